"""The pieces of a batch that one forward takes, moved to the device when their turn comes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.data.packing import cut
from ebbtide.types import TrainBatch

__all__ = ["Microbatch", "join", "microbatches", "spread"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some sequences of a batch, on the device.

    Attributes:
        index: its number within the batch on this rank.
        sequences: their numbers in the batch.
        batch: the sequences.
    """

    index: int
    sequences: tuple[int, ...]
    batch: TrainBatch


def microbatches(
    batch: TrainBatch, max_tokens: int, device: torch.device, *, keep_groups: bool = False
) -> Iterator[Microbatch]:
    """The batch in pieces of at most `max_tokens`.

    Args:
        batch: on the host.
        max_tokens: tokens of a piece at most, each prompt counted with each of its completions.
        device: where the pieces go.
        keep_groups: sequences of one group stay together where the budget allows.

    Raises:
        DataError: a sequence is longer.
    """
    lengths = batch.lengths.tolist()
    units = _units(batch.group_ids.tolist(), lengths, max_tokens) if keep_groups else [[b] for b in range(len(lengths))]
    (pieces,) = cut([sum(lengths[b] for b in unit) for unit in units], max_tokens)
    for index, piece in enumerate(pieces):
        sequences = sorted(b for unit in piece for b in units[unit])
        is_whole = sequences == list(range(batch.num_sequences))
        yield Microbatch(index, tuple(sequences), (batch if is_whole else batch.select(sequences)).to(device))


def join(batch: TrainBatch, parts: Iterator[tuple[Microbatch, Tensor]]) -> Tensor:
    """[T] on the host, in the batch's order, from [T] of each microbatch."""
    joined = torch.zeros(batch.num_tokens)
    starts = batch.cu_seqlens.tolist()
    for microbatch, values_T in parts:
        pieces = values_T.cpu().split(microbatch.batch.lengths.tolist())
        for sequence, piece in zip(microbatch.sequences, pieces, strict=True):
            joined[starts[sequence] : starts[sequence + 1]] = piece
    return joined


def spread(values_N: Tensor, mask_T: Tensor) -> Tensor:
    """[T]: the values where the mask is True, 0 elsewhere; differentiable."""
    return torch.zeros(mask_T.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_T, values_N)


def _units(group_ids: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Sequences that go together: a group, or as much of it as the budget holds."""
    units: list[list[int]] = []
    open_unit: dict[int, int] = {}
    size: list[int] = []
    for b, group in enumerate(group_ids):
        unit = open_unit.get(group)
        if unit is None or size[unit] + lengths[b] > max_tokens:
            unit = open_unit[group] = len(units)
            units.append([])
            size.append(0)
        units[unit].append(b)
        size[unit] += lengths[b]
    return units
