from dataclasses import replace

import pytest
import torch

from ebbtide.algorithms.base import Needs
from ebbtide.algorithms.reinforce_pp import ReinforcePP
from ebbtide.algorithms.rloo import RLOO
from ebbtide.config import validate
from tests.algorithms.cases import batch_of, group_of


def test_the_cost_is_taken_against_the_old_policy() -> None:
    # log old - log ref: 0.5 in bypass, where old is the rollout, and 0.25 when it is recomputed.
    batch = batch_of([[-1.0], [-1.0]], group_ids=[0, 0], rewards=[0.0, 0.0])
    ref_T = torch.where(batch.loss_mask & (batch.sequence_ids == 0), -1.5, batch.rollout_logprobs)
    old_T = torch.where(batch.loss_mask & (batch.sequence_ids == 0), -1.25, batch.rollout_logprobs)
    batch = replace(batch, ref_logprobs=ref_T, old_logprobs=old_T)
    for old_policy, cost in (("rollout", 0.5), ("recomputed", 0.25)):
        settings = {"type": "rloo", "old_policy": old_policy, "reward_kl": {"coef": 1.0}}
        prepared, metrics = RLOO(validate(RLOO.Config, settings)).prepare(batch, batch.counts(4))
        assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([-cost, cost])
        assert metrics["policy/old_ref_kl_nats"].value == pytest.approx(cost / 2)


def test_advantages_wait_for_prepare() -> None:
    algorithm = RLOO(RLOO.Config())
    assert [[float(a) for a in group] for group in algorithm.advantages([group_of([1.0, 0.0])])] == [[0, 0]]


def test_reference_is_needed_once_a_cost_is_charged() -> None:
    free = ReinforcePP(ReinforcePP.Config())
    charged = ReinforcePP(validate(ReinforcePP.Config, {"type": "reinforce_pp", "reward_kl": {"coef": 0.1}}))
    assert free.needs == Needs.NOTHING
    assert charged.needs == Needs.REF_LOGPROBS


def test_this_steps_coefficient_is_charged_before_it_moves() -> None:
    batch = batch_of([[-1.0], [-1.0]], group_ids=[0, 0], rewards=[1.0, 0.0])
    batch = replace(batch, ref_logprobs=torch.where(batch.loss_mask, -2.0, 0.0))
    settings = {"coef": 0.5, "target_nats": 0.5, "horizon_sequences": 2}
    algorithm = RLOO(validate(RLOO.Config, {"type": "rloo", "reward_kl": settings}))
    _, first = algorithm.prepare(batch, batch.counts(4))
    _, second = algorithm.prepare(batch, batch.counts(4))
    assert first["policy/reward_kl_coef"].value == pytest.approx(0.5)
    assert second["policy/reward_kl_coef"].value == pytest.approx(0.6)
