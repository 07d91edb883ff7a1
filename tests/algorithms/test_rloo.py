from dataclasses import replace

import pytest
import torch

from ebbtide.algorithms.base import Needs
from ebbtide.algorithms.rloo import RLOO
from ebbtide.config import validate
from tests.algorithms.cases import assert_matches, batch_of, inputs_of, logprobs_of, random_batch
from tests.reference.algorithms import policy_gradient_loss, rloo_advantages


def algorithm(**settings: object) -> RLOO:
    return RLOO(validate(RLOO.Config, {"type": "rloo", **settings}))


def test_advantages_and_loss_by_hand() -> None:
    # Others' means: 0.5, 1, 1.5 for rewards 2, 1, 0: advantages 1.5, 0, -1.5.
    batch = batch_of([[-1.0, -1.0], [-1.0], [-2.0]], group_ids=[0, 0, 0], rewards=[2.0, 1.0, 0.0])
    prepared, _ = algorithm().prepare(batch, batch.counts(4))
    assert prepared.advantages[batch.loss_mask].tolist() == [1.5, 1.5, 0, -1.5]
    # -(1.5 * (-1 - 3) + 0 - 1.5 * -2) / 3 sequences.
    loss, _ = algorithm().loss(inputs_of(prepared, logprobs_of(batch, [-1.0, -3.0, -1.0, -2.0])))
    assert loss.item() == pytest.approx(1.0)


def test_kl_of_the_whole_completion_is_in_the_reward() -> None:
    batch = batch_of([[-1.0, -1.0], [-1.0]], group_ids=[0, 0], rewards=[1.0, 1.0])
    ref_T = torch.zeros(batch.num_tokens)
    ref_T[batch.loss_mask] = torch.tensor([-1.5, -2.0, -1.0])
    batch = replace(batch, ref_logprobs=ref_T)
    rloo = algorithm(reward_kl={"coef": 0.1})
    assert rloo.needs == Needs.REF_LOGPROBS
    prepared, metrics = rloo.prepare(batch, batch.counts(4))
    # KL 0.5 + 1.0 and 0: rewards 0.85 and 1, so advantages -0.15 and 0.15.
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([-0.15, -0.15, 0.15])
    assert metrics["policy/old_ref_kl_nats"].value == pytest.approx(0.5)
    assert metrics["policy/reward_kl_coef"].value == pytest.approx(0.1)


def test_matches_the_reference() -> None:
    assert_matches(algorithm(), policy_gradient_loss, "sequence_sum")
    batch, _ = random_batch(3)
    prepared, _ = algorithm().prepare(batch, batch.counts(8))
    rewards = batch.rewards.view(-1, 3).tolist()
    expected = [a for group in rloo_advantages(rewards) for a in group]
    for b, advantage in enumerate(expected):
        mine = prepared.advantages[batch.loss_mask & (batch.sequence_ids == b)]
        assert mine.tolist() == pytest.approx([advantage] * len(mine), abs=1e-6)


def test_bypass_correction_weighs_by_policy_over_rollout() -> None:
    # Ratios exp(1) and exp(-1), truncated at 2: weights 2 and 1/e.
    batch = batch_of([[-2.0], [-1.0]], advantages=[1.0, 1.0])
    rloo = algorithm(correction={"weight": "token", "max_weight": 2.0})
    loss, metrics = rloo.loss(inputs_of(batch, logprobs_of(batch, [-1.0, -2.0])))
    e = 2.718281828459045
    assert loss.item() == pytest.approx((2 * 1.0 + 2.0 / e) / 2)
    assert metrics["correction/truncated_ratio"].value == pytest.approx(0.5)
    assert metrics["correction/ratio_mean"].value == pytest.approx((e + 1 / e) / 2)
