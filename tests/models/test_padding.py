import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.models.padding import PaddedBlocks, ranges, similar

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Lengths, and their sequences dealt into blocks in any order."""
    lengths = draw(LENGTHS)
    order = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {len(lengths)})
    blocks = [list(order[start:stop]) for start, stop in zip([0, *cuts[:-1]], cuts, strict=True)]
    return lengths, [block for block in blocks if block]


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_blocks_hold_each_sequence_and_merge_into_the_rows(layout: tuple[list[int], list[list[int]]]) -> None:
    lengths, blocks = layout
    rows = torch.arange(sum(lengths) * 2.0).view(-1, 2)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    padded = PaddedBlocks(lengths, blocks, torch.device("cpu"))
    split = padded.split(rows)
    assert [tuple(part.shape[:2]) for part in split] == padded.shapes
    for part, block in zip(split, blocks, strict=True):
        for row, b in zip(part, block, strict=True):
            assert torch.equal(row[: lengths[b]], rows[starts[b] : starts[b + 1]])
    assert torch.equal(padded.merge(split), rows)


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_gradients_of_real_slots_come_back_and_pads_have_none(layout: tuple[list[int], list[list[int]]]) -> None:
    lengths, blocks = layout
    rows = torch.randn(sum(lengths), 3, requires_grad=True)
    weight = torch.randn_like(rows)
    padded = PaddedBlocks(lengths, blocks, torch.device("cpu"))
    split = padded.split(rows)
    for part in split:
        part.retain_grad()
    (padded.merge(split) * weight).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, weight)
    for part, block in zip(split, blocks, strict=True):
        if part.grad is None:  # a view that autograd left out: no padding at all
            continue
        for grad, b in zip(part.grad, block, strict=True):
            assert float(grad[lengths[b] :].abs().sum()) == 0


@given(LENGTHS)
def test_similar_deals_each_sequence_once_and_pads_less_than_a_third(lengths: list[int]) -> None:
    groups = similar(lengths)
    assert sorted(b for group in groups for b in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[b] for b in group)
        assert all(4 * lengths[b] >= 3 * longest for b in group)
    num_slots = sum(len(group) * max(lengths[b] for b in group) for group in groups)
    assert num_slots <= sum(lengths) * 4 / 3


def test_equal_lengths_need_no_copy() -> None:
    assert similar([]) == []
    assert similar([4, 4, 4]) == [[0, 1, 2]]
    rows = torch.randn(12, 2)
    padded = PaddedBlocks([4, 4, 4], similar([4, 4, 4]), torch.device("cpu"))
    [block] = padded.split(rows)
    assert block.data_ptr() == rows.data_ptr()
    assert padded.merge([block]).data_ptr() == rows.data_ptr()


def test_no_sequence_at_all() -> None:
    padded = PaddedBlocks([], [], torch.device("cpu"))
    assert padded.split(torch.empty(0, 2)) == []


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=6))
def test_ranges_end_to_end(parts: list[tuple[int, int]]) -> None:
    starts = torch.tensor([start for start, _ in parts], dtype=torch.long)
    lengths = torch.tensor([length for _, length in parts], dtype=torch.long)
    expected = [start + i for start, length in parts for i in range(length)]
    assert ranges(starts, lengths).tolist() == expected


def test_blocks_that_are_in_order_but_padded_are_no_identity() -> None:
    padded = PaddedBlocks([1, 2], [[0, 1]], torch.device("cpu"))
    [block] = padded.split(torch.tensor([[5.0], [6.0], [7.0]]))
    assert block.flatten().tolist() == [5.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_any_dtype(dtype: torch.dtype) -> None:
    rows = torch.arange(3).to(dtype)
    padded = PaddedBlocks([1, 2], [[1], [0]], torch.device("cpu"))
    assert torch.equal(padded.merge(padded.split(rows)), rows)
