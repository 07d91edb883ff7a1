from dataclasses import replace

import pytest
import torch

from ebbtide.algorithms.reinforce_pp import ReinforcePP
from ebbtide.config import validate
from tests.algorithms.cases import MAX_TOKENS, assert_matches, batch_of, random_batch
from tests.reference.algorithms import clipped_loss, returns_by_definition, standardized


def algorithm(**settings: object) -> ReinforcePP:
    return ReinforcePP(validate(ReinforcePP.Config, {"type": "reinforce_pp", **settings}))


def test_advantages_by_hand() -> None:
    # Returns 2, 2 | 0, 0: mean 1, std sqrt(4 / 3): +-sqrt(3) / 2 on each token.
    batch = batch_of([[-1.0, -1.0], [-1.0, -1.0]], rewards=[2.0, 0.0])
    prepared, _ = algorithm().prepare(batch, batch.counts(4))
    half_root = 3**0.5 / 2
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([half_root] * 2 + [-half_root] * 2)


def test_longer_completions_weigh_more_in_the_mean() -> None:
    # Tokens 3, 0, 0, 0: mean 3/4, deviations 9/4 and -3/4, variance (81/16 + 27/16) / 3 = 9/4, std 3/2.
    batch = batch_of([[-1.0], [-1.0, -1.0, -1.0]], rewards=[3.0, 0.0])
    prepared, _ = algorithm().prepare(batch, batch.counts(4))
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("coef", [0.0, 0.2])
def test_advantages_match_the_reference(gamma: float, coef: float) -> None:
    batch, _ = random_batch(1)
    assert batch.ref_logprobs is not None
    settings = {"gamma": gamma, "reward_kl": {"coef": coef}}
    prepared, _ = algorithm(**settings).prepare(batch, batch.counts(MAX_TOKENS))
    returns: list[float] = []
    for b in range(batch.num_sequences):
        here_T = batch.loss_mask & (batch.sequence_ids == b)
        rewards = (-coef * (batch.rollout_logprobs[here_T] - batch.ref_logprobs[here_T])).tolist()
        rewards[-1] += float(batch.rewards[b])
        returns += returns_by_definition(rewards, gamma)
    expected = torch.tensor(standardized(returns))
    torch.testing.assert_close(prepared.advantages[batch.loss_mask], expected, rtol=1e-6, atol=1e-6)


def test_loss_matches_the_reference() -> None:
    assert_matches(algorithm(), clipped_loss(0.2, 0.2), "token_mean")


def test_the_coefficient_adapts_and_survives_a_checkpoint() -> None:
    # KL 0.5 a token against a target of 0.1: the error is held at 0.2, and 2 sequences of a horizon of 10 make 4 %.
    batch = batch_of([[-1.0], [-1.0]], rewards=[1.0, 0.0])
    batch = replace(batch, ref_logprobs=torch.where(batch.loss_mask, -1.5, 0.0))
    settings = {"reward_kl": {"coef": 0.1, "target_nats": 0.1, "horizon_sequences": 10}}
    running = algorithm(**settings)
    running.prepare(batch, batch.counts(4))
    assert running.state() == {"reward_kl_coef": pytest.approx(0.104)}
    resumed = algorithm(**settings)
    resumed.load_state(running.state())
    _, metrics = resumed.prepare(batch, batch.counts(4))
    assert metrics["policy/reward_kl_coef"].value == pytest.approx(0.104)
