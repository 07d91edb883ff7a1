"""The order of rows: whole epochs, the same after a resume, and without structure."""

import json
from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.data.sampler import Sampler
from ebbtide.errors import DataError


@given(num_rows=st.integers(1, 3000), batch=st.integers(1, 70), seed=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_every_epoch_draws_every_row_once(num_rows: int, batch: int, seed: int) -> None:
    sampler = Sampler(num_rows, batch, seed)
    drawn: list[int] = []
    while len(drawn) < 2 * num_rows:
        rows = sampler.next()
        assert len(rows) == batch
        drawn += rows
    assert sorted(drawn[:num_rows]) == list(range(num_rows))
    assert sorted(drawn[num_rows : 2 * num_rows]) == list(range(num_rows))


def test_the_order_is_fixed_for_ever() -> None:
    """A run saved today must go on in the same order under any later version of Python and numpy."""
    assert Sampler(10, 10, seed=0).draw(20) == [8, 3, 9, 4, 1, 5, 0, 7, 2, 6, 1, 0, 8, 5, 6, 2, 3, 7, 4, 9]


@pytest.mark.parametrize(("num_rows", "seed", "epoch"), [(1, 0, 0), (2, 0, 1), (10, 3, 2), (1000, 2**63, 5)])
def test_the_order_is_swap_or_not_with_plain_integers(num_rows: int, seed: int, epoch: int) -> None:
    sampler = Sampler(num_rows, 1, seed)
    sampler.draw(num_rows * epoch)
    assert sampler.draw(num_rows) == [_swap_or_not(row, num_rows, seed, epoch) for row in range(num_rows)]


def _swap_or_not(row: int, num_rows: int, seed: int, epoch: int) -> int:
    state = _splitmix(_splitmix(seed) ^ epoch)
    for _ in range(6 * num_rows.bit_length()):
        state = _splitmix(state)
        mirror = (state % num_rows - row) % num_rows
        if _splitmix_mix(max(row, mirror) * 0x9E3779B97F4A7C15 % 2**64 ^ state) >= 2**63:
            row = mirror
    return row


def _splitmix(value: int) -> int:
    return _splitmix_mix((value + 0x9E3779B97F4A7C15) % 2**64)


def _splitmix_mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def test_epochs_and_seeds_differ() -> None:
    sampler = Sampler(100, 100, seed=0)
    first, second = sampler.next(), sampler.next()
    assert first != second
    assert Sampler(100, 100, seed=1).next() not in (first, second)
    assert Sampler(100, 100, seed=0).next() == first


def test_the_size_of_the_draws_does_not_change_the_order() -> None:
    whole = Sampler(2500, 1, seed=3).draw(6000)
    sampler = Sampler(2500, 1, seed=3)
    pieces: list[int] = []
    for count in (1, 0, 1023, 1, 1024, 451, 2500, 999, 1):
        pieces += sampler.draw(count)
    assert pieces == whole


@pytest.mark.parametrize("num_batches", [0, 1, 7, 40])
def test_a_resumed_sampler_goes_on(num_batches: int) -> None:
    sampler = Sampler(100, 32, seed=5)
    for _ in range(num_batches):
        sampler.next()
    saved = json.loads(json.dumps(sampler.state()))
    expected = [sampler.next() for _ in range(10)]
    resumed = Sampler(100, 32, seed=5)
    resumed.next()
    resumed.load_state(saved)
    assert [resumed.next() for _ in range(10)] == expected
    assert resumed.state() == sampler.state()


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert Counter(Sampler(3, 9, seed=0).next()) == {0: 3, 1: 3, 2: 3}


def test_all_orders_of_a_few_rows_are_about_equally_likely() -> None:
    """24 orders of 4 rows over 4,800 epochs: 200 each; chi-square with 23 degrees is below 49.7 in 99.9 % of cases."""
    sampler = Sampler(4, 4, seed=11)
    counts = Counter(tuple(sampler.next()) for _ in range(4800))
    chi_square = sum((counts[order] - 200) ** 2 / 200 for order in permutations(range(4)))
    assert chi_square < 49.7


def test_neighbours_do_not_stay_neighbours() -> None:
    """In a random order of 5,000 rows the next row is the neighbour with probability 2/5,000: 2 on average."""
    rows = Sampler(5000, 5000, seed=2).next()
    assert sum(abs(a - b) == 1 for a, b in pairwise(rows)) < 10


def test_epoch_counts_passes_over_the_data() -> None:
    sampler = Sampler(10, 4, seed=0)
    sampler.next()
    assert sampler.epoch == 0.4


def test_huge_data_needs_no_table() -> None:
    rows = Sampler(10**12, 64, seed=0).next()
    assert len(set(rows)) == 64
    assert all(0 <= row < 10**12 for row in rows)


@pytest.mark.parametrize(("num_rows", "batch"), [(0, 1), (-1, 1), (5, 0)])
def test_bad_sizes_are_refused(num_rows: int, batch: int) -> None:
    with pytest.raises(DataError):
        Sampler(num_rows, batch, seed=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_rows": 99}, "sampler.num_rows=100"),
        ({"seed": 1}, "sampler.seed=0"),
        ({"position": -1}, "sampler.position=-1"),
        ({"position": None}, "sampler.position=None"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, int], text: str) -> None:
    sampler = Sampler(100, 10, seed=0)
    with pytest.raises(DataError, match=text):
        sampler.load_state({**sampler.state(), **change})
