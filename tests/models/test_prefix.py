"""Layouts by hand; that they change no number is tests/models/test_policy.py's to show."""

from dataclasses import replace

import pytest
import torch

from ebbtide.models import prefix
from ebbtide.models.attention import AttentionCall
from ebbtide.models.prefix import PrefixAttention, PrefixLayout
from ebbtide.types import TrainBatch


def batch_of(sequences: list[tuple[list[int], list[int]]], group_ids: list[int]) -> TrainBatch:
    rows = [(torch.tensor(p), torch.tensor(c, dtype=torch.long), torch.zeros(len(c))) for p, c in sequences]
    return TrainBatch.pack(rows, group_ids=group_ids)


def test_two_completions_of_one_prompt() -> None:
    """Packed: 5 6 | 7 8 9, 5 6 | 4. The forward runs over 5 6, then 7 8; 9 and 4 predict nothing."""
    layout = PrefixLayout.of(batch_of([([5, 6], [7, 8, 9]), ([5, 6], [4])], [0, 0]))
    assert layout.source.tolist() == [0, 1, 2, 3]
    assert layout.prompt_lengths.tolist() == [2]
    assert layout.completion_lengths.tolist() == [2, 0]
    assert layout.parents.tolist() == [0, 0]
    # 7 from the prompt's end, 8 from 7, 9 from 8; 4 from the prompt's end too.
    assert layout.predictor.tolist() == [1, 2, 3, 1]


def test_a_sequence_is_a_prompt_up_to_its_first_trained_token() -> None:
    """Multi-turn: 5 | 7 8 9 with 8 untrained inside; in the second sequence 7 is untrained and joins the prompt."""
    batch = batch_of([([5], [7, 8, 9]), ([5], [7, 8, 9])], [0, 0])
    mask = batch.loss_mask.clone()
    mask[2] = mask[5] = False
    layout = PrefixLayout.of(replace(batch, loss_mask=mask))
    assert layout.prompt_lengths.tolist() == [1, 2]
    assert layout.completion_lengths.tolist() == [2, 1]
    # Forward tokens: 5, 5 7, then 7 8, then 8.
    assert layout.source.tolist() == [0, 4, 5, 1, 2, 6]
    assert layout.predictor.tolist() == [0, 4, 2, 5]


def test_one_group_id_with_different_prompts_shares_nothing() -> None:
    sequences = [([5, 6], [7, 1]), ([5, 9], [7, 1]), ([5, 6], [8, 1]), ([5], [6, 1])]
    layout = PrefixLayout.of(batch_of(sequences, [3, 3, 3, 3]))
    assert layout.prompt_lengths.tolist() == [2, 2, 1]
    assert layout.parents.tolist() == [0, 1, 0, 2]


def test_equal_completions_are_one_but_for_their_last_token() -> None:
    """5 | 7 8 9 and 5 | 7 8 4 run over the same tokens; 5 | 7 3 9 does not, and neither does 6 | 7 8 9."""
    sequences = [([5], [7, 8, 9]), ([5], [7, 8, 4]), ([5], [7, 3, 9]), ([6], [7, 8, 9])]
    layout = PrefixLayout.of(batch_of(sequences, [0, 0, 0, 0]))
    assert layout.source.tolist() == [0, 12, 1, 2, 9, 10, 13, 14]
    assert layout.parents.tolist() == [0, 0, 1]
    assert layout.completion_lengths.tolist() == [2, 2, 2]
    assert layout.predictor.tolist() == [0, 2, 3, 0, 2, 3, 0, 4, 5, 1, 6, 7]


def test_equal_prompts_of_different_groups_stay_apart() -> None:
    layout = PrefixLayout.of(batch_of([([5, 6], [7]), ([5, 6], [7])], [0, 1]))
    assert layout.parents.tolist() == [0, 1]


def test_a_batch_without_a_trained_token_has_only_prompts() -> None:
    batch = batch_of([([5, 6], [7]), ([5, 6], [7])], [0, 0])
    layout = PrefixLayout.of(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
    assert layout.prompt_lengths.tolist() == [3]
    assert layout.predictor.tolist() == []
    assert layout.completion_lengths.tolist() == [0]


def test_it_pays_from_an_eighth_and_while_masks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = PrefixLayout.of(batch_of([([5] * 10, [7] * 9)], [0]))
    assert len(alone.source) == 18  # of 19: the last token alone does not pay
    assert not alone.pays
    pair = PrefixLayout.of(batch_of([([5] * 10, [7] * 9), ([5] * 10, [8] * 9)], [0, 0]))
    assert len(pair.source) == 26  # of 38
    assert pair.pays
    monkeypatch.setattr(prefix, "_MAX_MASK_ELEMENTS", 8 * 18 * 2 - 1)
    assert not pair.pays


def test_completions_see_their_prompt_and_no_other_completion() -> None:
    """Values are one-hot by token, so that the result names who was attended to."""
    layout = PrefixLayout.of(batch_of([([5, 6], [7, 8, 9]), ([5, 6], [4, 3, 2]), ([1], [2, 3])], [0, 0, 1]))
    S = len(layout.source)
    assert S == 3 + 2 + 2 + 1
    value = torch.eye(S)[:, None]
    query = key = torch.zeros(S, 1, S)
    plan = PrefixAttention(layout, torch.device("cpu"))
    attended = plan.attend(AttentionCall(0, query, key, value, scale=1.0, window=None, softcap=None))
    seen = [row.nonzero().squeeze(1).tolist() for row in attended[:, 0]]
    assert seen == [[0], [0, 1], [2], [0, 1, 3], [0, 1, 3, 4], [0, 1, 5], [0, 1, 5, 6], [2, 7]]
    narrow = plan.attend(AttentionCall(1, query, key, value, scale=1.0, window=2, softcap=None))
    seen = [row.nonzero().squeeze(1).tolist() for row in narrow[:, 0]]
    assert seen == [[0], [0, 1], [2], [1, 3], [3, 4], [1, 5], [5, 6], [2, 7]]
    assert plan.calls == 2
