"""Cutting into microbatches: nothing lost, budget kept, ranks even."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.data.packing import cut
from ebbtide.errors import DataError


def _check(lengths: list[int], max_tokens: int, num_ranks: int, pieces: list[list[list[int]]]) -> None:
    assert len(pieces) == num_ranks
    assert len({len(rank) for rank in pieces}) == 1, "ranks differ in their number of microbatches"
    taken = [b for rank in pieces for microbatch in rank for b in microbatch]
    assert sorted(taken) == list(range(len(lengths)))
    for rank in pieces:
        for microbatch in rank:
            assert sum(lengths[b] for b in microbatch) <= max_tokens
            assert microbatch == sorted(microbatch)


def test_worked_by_hand() -> None:
    """14 tokens in budgets of 8 need two: 5 | 4, then 3 joins 4, then 2 joins 5: 7 and 7."""
    assert cut([5, 3, 4, 2], max_tokens=8) == [[[0, 3], [1, 2]]]


def test_two_ranks_by_hand() -> None:
    """Four of 6 and four of 2 on two ranks, budget 8: two microbatches each, all of 8."""
    pieces = cut([6, 2, 6, 2, 6, 2, 6, 2], max_tokens=8, num_ranks=2)
    assert [[sum([6, 2, 6, 2, 6, 2, 6, 2][b] for b in m) for m in rank] for rank in pieces] == [[8, 8], [8, 8]]


def test_where_balancing_overflows_tight_packing_still_fits() -> None:
    """3, 3, 2, 2, 2 fill two budgets of 6; longest-first balancing makes 7 and 5."""
    pieces = cut([3, 3, 2, 2, 2], max_tokens=6)
    assert len(pieces[0]) == 2
    _check([3, 3, 2, 2, 2], 6, 1, pieces)


@given(
    lengths=st.lists(st.integers(0, 50), max_size=80),
    max_tokens=st.integers(50, 200),
    num_ranks=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_and_the_budget_holds(lengths: list[int], max_tokens: int, num_ranks: int) -> None:
    pieces = cut(lengths, max_tokens, num_ranks)
    _check(lengths, max_tokens, num_ranks, pieces)
    assert pieces == cut(lengths, max_tokens, num_ranks)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    max_tokens=st.integers(50, 200),
    num_ranks=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_few_microbatches_are_used(lengths: list[int], max_tokens: int, num_ranks: int) -> None:
    """No two of them could be one, so at most one is not half full; then they are rounded up to the ranks."""
    num_microbatches = len(cut(lengths, max_tokens, num_ranks)[0])
    assert num_microbatches <= -(-(2 * sum(lengths) // max_tokens + 1) // num_ranks)


def test_many_sequences_are_spread_evenly() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 2000, 10_000).tolist()
    pieces = cut(lengths, 8192, num_ranks=8)
    _check(lengths, 8192, 8, pieces)
    loads = np.array([[sum(lengths[b] for b in microbatch) for microbatch in rank] for rank in pieces])
    assert loads.shape[1] <= 1.02 * sum(lengths) / 8192 / 8 + 1
    totals = loads.sum(axis=1)
    assert totals.max() / totals.mean() < 1.001
    assert (loads.max(axis=0) - loads.min(axis=0)).max() <= 0.02 * 8192, "a rank waits in some microbatch"


def test_sequences_of_more_than_half_the_budget_stand_alone() -> None:
    lengths = [5000] * 2000
    pieces = cut(lengths, 8192, num_ranks=2)
    assert all(len(microbatch) == 1 for rank in pieces for microbatch in rank)
    _check(lengths, 8192, 2, pieces)


def test_the_order_of_equal_batches_does_not_matter_for_the_loads() -> None:
    lengths = [random.randint(1, 100) for _ in range(200)]
    shuffled = random.sample(lengths, len(lengths))

    def loads(values: list[int]) -> list[list[int]]:
        return [[sum(values[b] for b in microbatch) for microbatch in rank] for rank in cut(values, 400, 3)]

    assert loads(lengths) == loads(shuffled)


def test_fewer_sequences_than_ranks_leave_empty_microbatches() -> None:
    assert cut([4], max_tokens=8, num_ranks=3) == [[[0]], [[]], [[]]]
    assert cut([], max_tokens=8, num_ranks=2) == [[[]], [[]]]


def test_a_sequence_longer_than_the_budget_names_itself_and_the_remedy() -> None:
    with pytest.raises(DataError, match=r"max_tokens=8: sequence 1 has 9 tokens.*Raise the microbatch's token budget"):
        cut([1, 9], max_tokens=8)


@pytest.mark.parametrize(("lengths", "max_tokens", "num_ranks"), [([1], 0, 1), ([1], 8, 0), ([-1], 8, 1)])
def test_bad_arguments_are_refused(lengths: list[int], max_tokens: int, num_ranks: int) -> None:
    with pytest.raises(DataError):
        cut(lengths, max_tokens, num_ranks)
