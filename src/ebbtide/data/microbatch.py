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


def microbatches(batch: TrainBatch, max_tokens: int, device: torch.device) -> Iterator[Microbatch]:
    """The batch in pieces of at most `max_tokens`.

    Raises:
        DataError: a sequence is longer.
    """
    (pieces,) = cut(batch.lengths.tolist(), max_tokens)
    for index, sequences in enumerate(pieces):
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
