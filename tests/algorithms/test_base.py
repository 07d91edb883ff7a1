import math
from dataclasses import replace

import pytest
import torch

from ebbtide.algorithms.base import check_batch, check_groups
from ebbtide.errors import DataError
from tests.algorithms.cases import batch_of, group_of


def test_good_groups_and_batches_pass() -> None:
    check_groups([group_of([1, 0])], 2)
    check_batch(batch_of([[-1.0, -0.5], []], advantages=[1.0, 0.0]))


def test_a_group_too_small_is_refused() -> None:
    with pytest.raises(DataError, match=r"groups\[1\].completions=1: needs at least 2. Raise batch.group_size"):
        check_groups([group_of([1, 0]), group_of([1])], 2)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(DataError, match=r"groups\[0\].rewards=\[1.0, .*\]: rewards must be finite"):
        check_groups([group_of([1, reward])], 2)


def test_missing_or_misshapen_rewards_are_refused() -> None:
    group = group_of([1, 0])
    with pytest.raises(DataError, match=r"groups\[0\].rewards=None: must be one reward a completion, shape \(2,\)"):
        check_groups([replace(group, rewards=None)], 1)
    with pytest.raises(DataError, match=r"groups\[0\].rewards=\(3,\)"):
        check_groups([replace(group, rewards=torch.zeros(3))], 1)


def test_a_batch_without_trained_tokens_is_refused() -> None:
    with pytest.raises(DataError, match=r"batch.loss_mask=0: must have at least one trained token"):
        check_batch(batch_of([[], []]))


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("field", ["rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values"])
def test_a_trained_token_must_be_finite(field: str, value: float) -> None:
    batch = batch_of([[-1.0], [-1.0, -1.0, -1.0]])
    values_T = torch.full((batch.num_tokens,), -1.0)
    values_T[6] = value
    rule = rf"batch.{field}\[6\] \(sequence 1\)={value}: must be finite on a trained token, and 1 are not"
    with pytest.raises(DataError, match=rule):
        check_batch(replace(batch, **{field: values_T}))


def test_a_token_that_is_not_trained_may_hold_anything() -> None:
    batch = batch_of([[-1.0], [-1.0]])
    check_batch(replace(batch, rollout_logprobs=torch.where(batch.loss_mask, -1.0, torch.nan)))
