from dataclasses import replace

import pytest
import torch

from ebbtide.algorithms.base import LossInputs, Needs
from ebbtide.algorithms.ppo import PPO
from ebbtide.config import validate
from tests.algorithms.cases import MAX_TOKENS, assert_matches, batch_of, random_batch, samples_of
from tests.reference.algorithms import aggregate, clipped_loss, gae_by_definition, standardized, value_loss


def algorithm(**settings: object) -> PPO:
    return PPO(validate(PPO.Config, {"type": "ppo", **settings}))


def test_needs_values() -> None:
    assert algorithm().needs == Needs.VALUES


def test_advantages_and_returns_by_hand() -> None:
    # Values 0.5, 0.8; reward 1 at the end; gamma 1, lam 0.5: errors 0.3 and 0.2, so advantages 0.4 and 0.2.
    batch = batch_of([[-1.0, -1.0]], rewards=[1.0])
    values_T = torch.zeros(4)
    values_T[batch.loss_mask] = torch.tensor([0.5, 0.8])
    prepared, _ = algorithm(lam=0.5, whiten=False).prepare(replace(batch, values=values_T), batch.counts(4))
    assert prepared.returns is not None
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([0.4, 0.2])
    assert prepared.returns[batch.loss_mask].tolist() == pytest.approx([0.9, 1.0])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.97, 0.8)])
@pytest.mark.parametrize("coef", [0.0, 0.2])
def test_credit_matches_the_reference(gamma: float, lam: float, coef: float) -> None:
    batch, _ = random_batch(2)
    assert batch.ref_logprobs is not None
    assert batch.values is not None
    ppo = algorithm(gamma=gamma, lam=lam, reward_kl={"coef": coef})
    prepared, _ = ppo.prepare(batch, batch.counts(MAX_TOKENS))
    advantages: list[float] = []
    returns: list[float] = []
    for b in range(batch.num_sequences):
        here_T = batch.loss_mask & (batch.sequence_ids == b)
        rewards = (-coef * (batch.rollout_logprobs[here_T] - batch.ref_logprobs[here_T])).tolist()
        rewards[-1] += float(batch.rewards[b])
        values = batch.values[here_T].tolist()
        found = gae_by_definition(rewards, values, gamma, lam)
        advantages += found
        returns += [a + v for a, v in zip(found, values, strict=True)]
    assert prepared.returns is not None
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx(standardized(advantages), abs=1e-6)
    assert prepared.returns[batch.loss_mask].tolist() == pytest.approx(returns, abs=1e-6)


def test_policy_loss_matches_the_reference() -> None:
    assert_matches(algorithm(), clipped_loss(0.2, 0.2), "token_mean")


def test_critic_loss_by_hand() -> None:
    # Old value 0, return 1. Value 0.5 is held at 0.2: the larger error is 0.8. Value 0.1 is free: 0.9.
    batch = batch_of([[-1.0, -1.0]])
    mask_T = batch.loss_mask
    values_T = torch.zeros(4)
    values_T[mask_T] = torch.tensor([0.5, 0.1])
    values_T.requires_grad_()
    batch = replace(batch, values=torch.zeros(4), returns=torch.where(mask_T, 1.0, 0.0))
    inputs = LossInputs(batch, batch.counts(4), torch.zeros(4), values=values_T)
    loss, metrics = algorithm().critic_loss(inputs)
    assert loss.item() == pytest.approx((0.64 + 0.81) / 4)
    (gradient,) = torch.autograd.grad(loss, values_T)
    assert gradient[mask_T].tolist() == pytest.approx([0.0, -0.45])
    assert metrics["critic/clipped_ratio"].value == pytest.approx(0.5)
    assert algorithm(value_clip=None).critic_loss(inputs)[0].item() == pytest.approx((0.25 + 0.81) / 4)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_critic_loss_matches_the_reference(aggregation: str) -> None:
    batch, policy = random_batch(4)
    assert batch.values is not None
    values_T = (batch.values + 0.2).requires_grad_()
    inputs = LossInputs(batch, batch.counts(MAX_TOKENS), policy, values=values_T)
    loss, _ = algorithm(value_clip=0.1, aggregation=aggregation).critic_loss(inputs)
    (gradient,) = torch.autograd.grad(loss, values_T)
    reference_values_T = values_T.detach().clone().requires_grad_()
    samples = samples_of(batch, policy, reference_values_T, batch.rollout_logprobs)
    expected = aggregate([value_loss(0.1)(sample) for sample in samples], aggregation, MAX_TOKENS)
    (expected_gradient,) = torch.autograd.grad(expected, reference_values_T)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
