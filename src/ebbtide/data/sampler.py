"""The order in which rows are drawn: one seeded permutation an epoch, computed where it is needed, never stored."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.errors import DataError, problem

__all__ = ["Sampler"]

_CHUNK = 1024
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Sampler:
    """Row numbers without end. What comes next depends on seed and position alone, so that a resumed run goes on.

    Example:
        >>> sampler = Sampler(num_rows=3, batch=2, seed=0)
        >>> epoch = sampler.next() + sampler.next() + sampler.next()
        >>> sorted(epoch[:3]), sorted(epoch[3:])
        ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self, num_rows: int, batch: int, seed: int) -> None:
        if num_rows < 1:
            raise DataError(problem("data", num_rows, "the dataset has no rows to train on"))
        if batch < 1:
            raise DataError(problem("batch.prompts", batch, "must be at least 1"))
        self.num_rows = num_rows
        self.batch = batch
        self.seed = seed
        self._position = 0
        self._chunk: list[int] = []
        self._chunk_start = 0

    @property
    def epoch(self) -> float:
        """How often all rows have been drawn."""
        return self._position / self.num_rows

    def next(self) -> list[int]:
        """The rows of the next batch."""
        return self.draw(self.batch)

    def draw(self, count: int) -> list[int]:
        """The next `count` rows; an epoch may end anywhere among them."""
        rows: list[int] = []
        while len(rows) < count:
            at = self._position - self._chunk_start
            if not 0 <= at < len(self._chunk):
                self._fill()
                at = 0
            taken = self._chunk[at : at + count - len(rows)]
            rows += taken
            self._position += len(taken)
        return rows

    def state(self) -> dict[str, int]:
        """Everything that `load_state` needs, as plain integers."""
        return {"position": self._position, "num_rows": self.num_rows, "seed": self.seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; the size of a batch may differ.

        Raises:
            DataError: the state belongs to a dataset of another size or to another seed.
        """
        for name in ("num_rows", "seed"):
            if state.get(name) != getattr(self, name):
                rule = f"the sampler's state was saved with {name}={state.get(name)!r}, so the order would not go on"
                raise DataError(
                    problem(f"sampler.{name}", getattr(self, name), rule, "Resume with the same data and seed")
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise DataError(problem("sampler.position", position, "must be an integer, not negative"))
        self._position = position
        self._chunk = []

    def _fill(self) -> None:
        epoch, offset = divmod(self._position, self.num_rows)
        stop = min(offset + _CHUNK, self.num_rows)
        self._chunk_start = self._position
        self._chunk = _permuted(np.arange(offset, stop), self.num_rows, (self.seed, epoch)).tolist()


def _permuted(offsets: NDArray[np.int64], size: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """Where a keyed permutation of range(size) sends `offsets`.

    In each round an element and its mirror image about a keyed point change places, or not, by a hash of the pair.
    Needs no table and no power-of-two domain; six rounds a bit leave no visible structure.

    Source: swap-or-not (Hoang, Morris, Rogaway, CRYPTO 2012), with a fast hash in place of a cipher.
    """
    x = offsets.astype(np.int64)
    state = _mixed(_mixed(key[0] & _MASK) ^ (key[1] & _MASK))
    for _ in range(6 * size.bit_length()):
        state = _mixed(state)
        mirror = (state % size - x) % size
        pair = np.maximum(x, mirror).astype(np.uint64)
        is_swapped = (_mixed_array(pair, state) >> np.uint64(63)).astype(bool)
        x = np.where(is_swapped, mirror, x)
    return x


def _mixed(value: int) -> int:
    """One step of the splitmix64 generator."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mixed_array(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    mixed = (values * np.uint64(_GOLDEN)) ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
