import math
from dataclasses import replace

import pytest
import torch

from ebbtide.algorithms.base import Needs
from ebbtide.algorithms.grpo import GRPO
from ebbtide.config import validate
from ebbtide.errors import CheckpointError, ConfigError
from tests.algorithms.cases import assert_matches, batch_of, group_of, inputs_of, logprobs_of
from tests.reference.algorithms import Sample, clipped_loss, group_advantages, kl_terms


def algorithm(**settings: object) -> GRPO:
    return GRPO(validate(GRPO.Config, settings))


def test_advantages_by_hand() -> None:
    # Mean 1/2; squares sum to 4 * 1/4 = 1; over G - 1 = 3 the deviation is 1 / sqrt(3); so +-(1/2) * sqrt(3).
    advantages = algorithm(scale_eps=1e-12).advantages([group_of([1, 0, 0, 1]), group_of([2, 2])])
    half_root = 0.5 * math.sqrt(3)
    assert [float(a) for a in advantages[0]] == pytest.approx([half_root, -half_root, -half_root, half_root])
    assert [float(a) for a in advantages[1]] == [0.0, 0.0]


def test_advantages_scaled_by_batch_or_by_nothing() -> None:
    groups = [group_of([1, 0]), group_of([3, 3])]
    # Rewards 1, 0, 3, 3: mean 7/4, squares 9/16 + 49/16 + 25/16 + 25/16 = 27/4, over 3 = 9/4, deviation 3/2.
    batch = algorithm(scale="batch", scale_eps=1e-12).advantages(groups)
    assert [float(a) for group in batch for a in group] == pytest.approx([1 / 3, -1 / 3, 0, 0])
    plain = algorithm(scale="none").advantages(groups)
    assert [float(a) for group in plain for a in group] == [0.5, -0.5, 0, 0]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", -0.3), ("sequence_mean", -0.025), ("constant", -0.1125)]
)
def test_loss_by_hand(aggregation: str, expected: float) -> None:
    # Ratios 1.5 and 0.5 at advantage 1: -min(1.5, 1.2) and -min(0.5, 0.8); ratio 0.5 at -1: max(0.5, 0.8).
    # Sum -1.2 - 0.5 + 0.8 = -0.9: over 3 tokens; as (-1.7 / 2 + 0.8) / 2; over 2 sequences x 4 tokens.
    batch = batch_of([[-1.0, -1.0], [-2.0]], advantages=[1.0, -1.0])
    logprobs = logprobs_of(batch, [-1 + math.log(1.5), -1 + math.log(0.5), -2 + math.log(0.5)])
    loss, metrics = algorithm(aggregation=aggregation).loss(inputs_of(batch, logprobs))
    assert loss.item() == pytest.approx(expected)
    assert metrics["policy/ratio_mean"].value == pytest.approx(2.5 / 3)
    assert metrics["policy/clipped_high_ratio"].value == pytest.approx(1 / 3)
    assert metrics["policy/clipped_low_ratio"].value == pytest.approx(1 / 3)


def test_gradient_by_hand() -> None:
    # Only the second token is not held by a bound: d(-ratio * A / 3) = -0.5 / 3.
    batch = batch_of([[-1.0, -1.0], [-2.0]], advantages=[1.0, -1.0])
    logprobs = logprobs_of(batch, [-1 + math.log(1.5), -1 + math.log(0.5), -2 + math.log(0.5)])
    loss, _ = algorithm().loss(inputs_of(batch, logprobs))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[batch.loss_mask].tolist() == pytest.approx([0, -0.5 / 3, 0])
    assert not gradient[~batch.loss_mask].any()


def test_dual_clip_bounds_a_negative_advantage() -> None:
    batch = batch_of([[-1.0]], advantages=[-1.0])
    logprobs = logprobs_of(batch, [-1 + math.log(10)])
    assert algorithm().loss(inputs_of(batch, logprobs))[0].item() == pytest.approx(10)
    loss, metrics = algorithm(clip_dual=3.0).loss(inputs_of(batch, logprobs))
    assert loss.item() == pytest.approx(3)
    assert metrics["policy/clipped_dual_ratio"].value == 1
    assert not torch.autograd.grad(loss, logprobs)[0].any()


def test_kl_and_entropy_by_hand() -> None:
    # log(policy / ref) = 0.5 on the only token: k3 = exp(-0.5) - 1 + 0.5.
    batch = replace(batch_of([[-1.0]], advantages=[0.0]), ref_logprobs=torch.tensor([0.0, 0.0, -1.5]))
    logprobs = logprobs_of(batch, [-1.0])
    inputs = replace(inputs_of(batch, logprobs), entropy=torch.tensor([9.0, 9.0, 0.7]))
    loss, metrics = algorithm(kl={"coef": 0.1}, entropy_coef=0.01).loss(inputs)
    k3 = math.exp(-0.5) - 0.5
    assert loss.item() == pytest.approx(0.1 * k3 - 0.01 * 0.7)
    assert metrics["policy/ref_kl_nats"].value == pytest.approx(k3)
    assert metrics["policy/entropy_nats"].value == pytest.approx(0.7)
    assert float(torch.autograd.grad(loss, logprobs)[0][2]) == pytest.approx(0.1 * (1 - math.exp(-0.5)))


def test_recomputed_old_policy_takes_the_place_of_the_rollouts() -> None:
    batch = replace(batch_of([[-5.0]], advantages=[1.0]), old_logprobs=torch.tensor([0.0, 0.0, -1.0]))
    loss, _ = algorithm(old_policy="recomputed").loss(inputs_of(batch, logprobs_of(batch, [-1 + math.log(1.1)])))
    assert loss.item() == pytest.approx(-1.1)


def test_needs_follow_the_settings() -> None:
    assert algorithm().needs == Needs.NOTHING
    assert algorithm(old_policy="recomputed").needs == Needs.OLD_LOGPROBS
    assert algorithm(kl={"coef": 0.1}, entropy_coef=0.1).needs == Needs.REF_LOGPROBS | Needs.ENTROPY


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"estimator=.k1.: has no effect with coef"):
        algorithm(kl={"estimator": "k1"})
    with pytest.raises(ConfigError, match="less than or equal to 1"):
        algorithm(clip_low=1.5)


def test_state_of_another_algorithm_is_refused() -> None:
    grpo = algorithm()
    grpo.load_state(grpo.state())
    with pytest.raises(CheckpointError, match="keeps no state"):
        grpo.load_state({"coef": 0.1})


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("dual", [None, 1.1])
def test_matches_the_reference(aggregation: str, dual: float | None) -> None:
    settings = {} if dual is None else {"clip_dual": dual}
    assert_matches(algorithm(aggregation=aggregation, **settings), clipped_loss(0.2, 0.2, dual), aggregation)
    recomputed = algorithm(aggregation=aggregation, old_policy="recomputed", clip_high=0.3, **settings)
    assert_matches(recomputed, clipped_loss(0.2, 0.3, dual), aggregation, old="old_logprobs")


def test_advantages_match_the_reference() -> None:
    rewards = [[1.0, 0.0, 0.5], [3.0, 3.0, 3.0, 3.0], [0.25, -4.0]]
    found = algorithm(scale_eps=1e-6).advantages([group_of(group) for group in rewards])
    expected = group_advantages(rewards, 1e-6)
    for mine, theirs in zip(found, expected, strict=True):
        assert [float(a) for a in mine] == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gradient", ["plain", "straight_through", "importance_weighted"])
def test_kl_in_the_loss_matches_the_reference(estimator: str, gradient: str) -> None:
    def with_kl(sample: Sample) -> torch.Tensor:
        return clipped_loss(0.2, 0.2)(sample) + 0.3 * kl_terms(sample, estimator, gradient)

    grpo = algorithm(kl={"coef": 0.3, "estimator": estimator, "gradient": gradient})
    assert_matches(grpo, with_kl, "token_mean")
