"""Cutting a batch into microbatches by a token budget, balanced over ranks and over microbatches."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np

from ebbtide.errors import DataError, problem

__all__ = ["cut"]


def cut(lengths: Sequence[int], max_tokens: int, num_ranks: int = 1) -> list[list[list[int]]]:
    """Which sequences each rank takes in each of its microbatches.

    Every rank gets the same number of microbatches, as ranks wait for one another in each; where there are fewer
    sequences than microbatches the last ones are empty. Microbatch j is of nearly the same size on every rank.

    Args:
        lengths: [B], tokens of each sequence.
        max_tokens: tokens of a microbatch at most.
        num_ranks: data-parallel ranks.

    Returns:
        `cut[rank][microbatch]`, sequence numbers in ascending order.

    Raises:
        DataError: a sequence is longer than the budget, or an argument is out of range.

    Example:
        >>> cut([5, 3, 4, 2], max_tokens=8)
        [[[0, 3], [1, 2]]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    _check(sizes, max_tokens, num_ranks)
    order = np.argsort(-sizes, kind="stable").tolist()
    sized = [(int(sizes[b]), b) for b in order]
    fewest = max(1, -(-int(sizes.sum()) // max_tokens))
    num_bins = -(-fewest // num_ranks) * num_ranks
    bins = _balanced(sized, num_bins)
    if _largest(bins, sizes) > max_tokens:
        tight = _tight(sized, max_tokens)
        num_bins = -(-len(tight) // num_ranks) * num_ranks
        bins = _balanced(sized, num_bins)
        if _largest(bins, sizes) > max_tokens:
            bins = tight + [[] for _ in range(num_bins - len(tight))]
    return _dealt(bins, sizes, num_ranks)


def _check(sizes: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", max_tokens: int, num_ranks: int) -> None:
    if num_ranks < 1:
        raise DataError(problem("num_ranks", num_ranks, "must be at least 1"))
    if max_tokens < 1:
        raise DataError(problem("max_tokens", max_tokens, "must be at least 1"))
    if sizes.ndim != 1 or (sizes < 0).any():
        raise DataError(problem("lengths", sizes.tolist(), "must be a list of token counts, none negative"))
    if len(sizes) and int(sizes.max()) > max_tokens:
        b = int(sizes.argmax())
        rule = f"sequence {b} has {int(sizes[b])} tokens, and a sequence is never split"
        remedy = "Raise the microbatch's token budget to at least the longest prompt plus sampling.max_tokens"
        raise DataError(problem("max_tokens", max_tokens, rule, remedy))


def _balanced(sized: Sequence[tuple[int, int]], num_bins: int) -> list[list[int]]:
    """Longest first, each into the bin that holds least."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    heapify(heap)
    for size, b in sized:
        load, number = heap[0]
        bins[number].append(b)
        heapreplace(heap, (load + size, number))
    return bins


def _tight(sized: Sequence[tuple[int, int]], max_tokens: int) -> list[list[int]]:
    """Longest first, each into the fullest bin that it still fits: at most 11/9 of the fewest bins possible."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for size, b in sized:
        at = bisect_left(room, (size, -1))
        if at == len(room):
            bins.append([b])
            insort(room, (max_tokens - size, len(bins) - 1))
        else:
            left, number = room.pop(at)
            bins[number].append(b)
            insort(room, (left - size, number))
    return bins


def _largest(bins: Sequence[Sequence[int]], sizes: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> int:
    return max(int(sizes[members].sum()) if members else 0 for members in bins)


def _dealt(
    bins: list[list[int]], sizes: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", num_ranks: int
) -> list[list[list[int]]]:
    """Largest bins first, one to each rank, in turning direction, so that ranks stay even in each and in total."""
    bins = sorted((sorted(members) for members in bins), key=lambda m: (-int(sizes[m].sum()) if m else 0, not m, m))
    rounds = [bins[start : start + num_ranks] for start in range(0, len(bins), num_ranks)]
    turned = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rounds)]
    return [[row[rank] for row in turned] for rank in range(num_ranks)]
