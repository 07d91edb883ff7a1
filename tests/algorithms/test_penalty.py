import math

import pytest
import torch

from ebbtide.algorithms.penalty import Estimator, LossKL, RewardKL, RewardPenalty, estimate, loss_kl
from ebbtide.config import validate
from ebbtide.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_estimators_by_hand(estimator: Estimator, expected: float) -> None:
    assert estimate(torch.tensor(0.5), estimator).item() == pytest.approx(expected)
    assert estimate(torch.tensor(0.0), estimator).item() == 0
    for extreme in (-1e4, 1e4, math.inf, -math.inf):
        assert estimate(torch.tensor(extreme), estimator).isfinite()


def test_k3_keeps_its_digits_near_zero() -> None:
    assert estimate(torch.tensor(1e-3, dtype=torch.float64), "k3").item() == pytest.approx(4.99833e-7, rel=1e-5)
    assert estimate(torch.linspace(-5, 5, 101), "k3").min() >= 0


def test_k1_and_k3_are_unbiased() -> None:
    # The exact KL of two distributions over 3 tokens, against the estimators' means under the first.
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert (p * estimate((p / q).log(), estimator)).sum().item() == pytest.approx(exact.item())


def test_unbiased_gradients() -> None:
    # Expected gradients over the sampled token, against autograd through the exact KL; plain k3 has another one.
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    old = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)

    def expected_gradient(kl: LossKL, sampled_from: torch.Tensor) -> torch.Tensor:
        log_p = logits.log_softmax(0)
        terms = loss_kl(kl, log_p - q.log(), log_p - sampled_from.log())
        return torch.autograd.grad((sampled_from * terms).sum(), logits)[0]

    log_p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - q.log())).sum(), logits)
    p = log_p.exp().detach()
    torch.testing.assert_close(expected_gradient(LossKL(coef=1, gradient="straight_through"), p), exact)
    for estimator in ("k1", "k3"):
        weighted = validate(LossKL, {"coef": 1.0, "estimator": estimator, "gradient": "importance_weighted"})
        torch.testing.assert_close(expected_gradient(weighted, old), exact)
    torch.testing.assert_close(expected_gradient(LossKL(coef=1, estimator="k2"), p), exact)
    assert not torch.allclose(expected_gradient(LossKL(coef=1), p), exact, atol=1e-2)


def test_straight_through_keeps_the_value() -> None:
    log_ratio = torch.tensor([0.5], requires_grad=True)
    term = loss_kl(LossKL(coef=1, gradient="straight_through"), log_ratio, log_ratio)
    assert term.item() == pytest.approx(math.exp(-0.5) - 0.5)
    assert torch.autograd.grad(term.sum(), log_ratio)[0].item() == pytest.approx(0.5)


def test_the_controller_by_hand() -> None:
    penalty = RewardPenalty(RewardKL(coef=0.1, target_nats=0.05, horizon_sequences=100))
    assert penalty.costs(torch.tensor([2.0])).tolist() == pytest.approx([0.2])
    penalty.steer(0.055, 50)  # 10 % above: 0.1 x 50 / 100 = 5 % up
    assert penalty.coef == pytest.approx(0.105)
    penalty.steer(0.0, 50)  # far below: held at 20 %, so 10 % down
    assert penalty.coef == pytest.approx(0.0945)


def test_a_fixed_coefficient_stays() -> None:
    penalty = RewardPenalty(RewardKL(coef=0.1))
    penalty.steer(99.0, 1000)
    assert penalty.coef == 0.1
    assert penalty.state() == {}


def test_state_of_other_settings_is_refused() -> None:
    adaptive = RewardPenalty(RewardKL(coef=0.1, target_nats=0.05))
    with pytest.raises(CheckpointError, match=r"algorithm.state=\[\]: must have the keys \['reward_kl_coef'\]"):
        adaptive.load_state({})
    with pytest.raises(CheckpointError, match="must have the keys"):
        RewardPenalty(RewardKL(coef=0.1)).load_state({"reward_kl_coef": 0.2})


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"estimator": "k3"}, "the other settings have no effect without it"),
        ({"target_nats": 0.1}, "the other settings have no effect without it"),
        ({"coef": 0.1, "horizon_sequences": 5}, "horizon_sequences=5: has no effect without target_nats"),
        ({"coef": -0.1}, "coef=-0.1"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        validate(RewardKL, settings)
