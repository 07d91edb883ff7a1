"""The pieces of a batch: whole, lazily made, filled up, and joined again."""

import pytest
import torch

from ebbtide.data.microbatch import join, microbatches, spread
from ebbtide.errors import DataError
from ebbtide.types import TrainBatch

CPU = torch.device("cpu")


def batch(lengths: list[int], groups: list[int] | None = None) -> TrainBatch:
    """Token t of sequence b is 10 b + t."""
    rows = [torch.arange(length) + 10 * b for b, length in enumerate(lengths)]
    return TrainBatch.pack([(row[:1], row[1:], torch.zeros(len(row) - 1)) for row in rows], group_ids=groups)


def test_every_sequence_is_in_one_piece_within_the_budget() -> None:
    pieces = microbatches(batch([5, 3, 4, 2]), 8, CPU)
    assert len(pieces) == 2
    assert [piece.sequences for piece in pieces] == [(0, 3), (1, 2)]
    assert [piece.batch.tokens.tolist() for piece in pieces] == [[0, 1, 2, 3, 4, 30, 31], [10, 11, 12, 20, 21, 22, 23]]
    assert [piece.index for piece in pieces] == [0, 1]


def test_groups_stay_together_where_they_fit() -> None:
    pieces = microbatches(batch([3, 3, 3, 3, 3, 3], [0, 1, 0, 1, 0, 1]), 9, CPU, keep_groups=True)
    assert sorted(piece.sequences for piece in pieces) == [(0, 2, 4), (1, 3, 5)]


def test_a_group_beyond_the_budget_is_parted() -> None:
    pieces = microbatches(batch([4, 4, 4], [0, 0, 0]), 8, CPU, keep_groups=True)
    assert sorted(len(piece.sequences) for piece in pieces) == [1, 2]


def test_a_batch_in_one_piece_is_not_copied() -> None:
    whole = batch([2, 3])
    (piece,) = microbatches(whole, 8, CPU)
    assert piece.batch.tokens.data_ptr() == whole.tokens.data_ptr()


def test_pieces_are_made_anew_each_time() -> None:
    pieces = microbatches(batch([3, 3]), 3, CPU)
    assert pieces[0].batch.tokens.data_ptr() != pieces[0].batch.tokens.data_ptr() or pieces[0] is not pieces[0]
    with pytest.raises(IndexError):
        pieces[2]


def test_fillers_count_for_nothing() -> None:
    own = batch([3, 2])
    pieces = microbatches(own, 3, CPU).filled_up(4)
    assert [piece.is_filler for piece in pieces] == [False, False, True, True]
    assert int(pieces[3].batch.loss_mask.sum()) == 1, "one token follows another, so that a forward has something to do"
    joined = join(own, ((piece, torch.full((piece.batch.num_tokens,), float(piece.index))) for piece in pieces))
    assert joined.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_no_sequence_makes_no_piece() -> None:
    none = batch([2]).select([])
    assert len(microbatches(none, 8, CPU)) == 0
    assert [piece.is_filler for piece in microbatches(none, 8, CPU).filled_up(1)] == [True]


def test_a_sequence_beyond_the_budget_is_an_error() -> None:
    with pytest.raises(DataError, match="sequence 1 has 9 tokens, and a sequence is never split"):
        microbatches(batch([2, 9]), 8, CPU)


def test_spread_puts_values_where_the_mask_is_and_carries_their_gradient() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    spread_T = spread(values, torch.tensor([False, True, False, True]))
    assert spread_T.tolist() == [0.0, 1.0, 0.0, 2.0]
    (spread_T * torch.tensor([5.0, 6.0, 7.0, 8.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [6.0, 8.0]
