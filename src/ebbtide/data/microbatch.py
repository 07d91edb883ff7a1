"""The pieces of a batch that one forward takes, moved to the device when their turn comes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebbtide.data.packing import cut
from ebbtide.types import TrainBatch

__all__ = ["Microbatch", "Microbatches", "join", "microbatches", "spread"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some sequences of a batch, on the device.

    Attributes:
        index: its number within the batch on this rank.
        sequences: their numbers in the batch; none of a filler.
        batch: the sequences.
    """

    index: int
    sequences: tuple[int, ...]
    batch: TrainBatch

    @property
    def is_filler(self) -> bool:
        """Whether it only keeps a rank in step that has fewer microbatches than another; nothing in it counts."""
        return not self.sequences


class Microbatches(Sequence[Microbatch]):
    """The pieces of one batch; each is made when it is asked for, and kept by nobody else.

    Beyond `num_own` they are fillers: a token that follows another.
    """

    def __init__(
        self, batch: TrainBatch, pieces: list[tuple[int, ...]], device: torch.device, num: int | None = None
    ) -> None:
        """pieces: the sequences of each. num: how many there shall be, fillers included."""
        self.num_own = len(pieces)
        self._batch, self._pieces, self._device = batch, pieces, device
        self._num = self.num_own if num is None else num
        assert self._num >= self.num_own, (num, len(pieces))

    def filled_up(self, num: int) -> "Microbatches":
        """The same with fillers, `num` in all."""
        return Microbatches(self._batch, self._pieces, self._device, num)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._num:
            raise IndexError(index)
        if index >= self.num_own:
            return Microbatch(index, (), _filler().to(self._device))
        sequences = self._pieces[index]
        is_whole = sequences == tuple(range(self._batch.num_sequences))
        batch = self._batch if is_whole else self._batch.select(sequences)
        return Microbatch(index, sequences, batch.to(self._device))


def microbatches(
    batch: TrainBatch, max_tokens: int, device: torch.device, *, keep_groups: bool = False
) -> Microbatches:
    """The batch in pieces of at most `max_tokens`.

    Args:
        batch: on the host; may hold no sequence, and then there is no piece.
        max_tokens: tokens of a piece at most, each prompt counted with each of its completions.
        device: where the pieces go.
        keep_groups: sequences of one group stay together where the budget allows.

    Raises:
        DataError: a sequence is longer.
    """
    lengths = batch.lengths.tolist()
    units = _units(batch.group_ids.tolist(), lengths, max_tokens) if keep_groups else [[b] for b in range(len(lengths))]
    (pieces,) = cut([sum(lengths[b] for b in unit) for unit in units], max_tokens)
    sequences = [tuple(sorted(b for unit in piece for b in units[unit])) for piece in pieces]
    return Microbatches(batch, [piece for piece in sequences if piece], device)


def join(batch: TrainBatch, parts: Iterable[tuple[Microbatch, Tensor]]) -> Tensor:
    """[T] on the host, in the batch's order, from [T] of each microbatch."""
    joined = torch.zeros(batch.num_tokens)
    starts = batch.cu_seqlens.tolist()
    for microbatch, values_T in parts:
        if microbatch.is_filler:
            continue
        pieces = values_T.cpu().split(microbatch.batch.lengths.tolist())
        for sequence, piece in zip(microbatch.sequences, pieces, strict=True):
            joined[starts[sequence] : starts[sequence + 1]] = piece
    return joined


def spread(values_N: Tensor, mask_T: Tensor) -> Tensor:
    """[T]: the values where the mask is True, 0 elsewhere; differentiable."""
    return torch.zeros(mask_T.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_T, values_N)


def _filler() -> TrainBatch:
    one = torch.zeros(1, dtype=torch.long)
    return TrainBatch.pack([(one, one, torch.zeros(1))])


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
