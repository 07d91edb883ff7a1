"""The pull towards the reference policy, as a term of the loss or of the reward, and the estimators of its KL."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ebbtide.config import Section
from ebbtide.errors import CheckpointError, ConfigError, problem

__all__ = ["LOG_RATIO_BOUND", "Estimator", "LossKL", "RewardKL", "RewardPenalty", "estimate", "loss_kl"]

LOG_RATIO_BOUND = 20.0  # exp of it is 4.9e8: far beyond any clip, and its square still finite in float32

Estimator = Literal["k1", "k2", "k3"]


class LossKL(Section):
    """KL(policy || reference) as a term of the loss."""

    coef: float = Field(0.0, ge=0)
    """Factor of the KL term; 0 switches it off, and then no reference log-probs are computed."""
    estimator: Estimator = "k3"
    """k1 = log ratio; k2 = half its square; k3 = exp(-k1) - 1 + k1, never negative and of low variance."""
    gradient: Literal["plain", "straight_through", "importance_weighted"] = "plain"
    """plain: the estimator's own. straight_through: that of k2, unbiased on-policy. importance_weighted: by the factor
    policy / old policy, unbiased with k1 and k3 when the old policy sampled."""

    @model_validator(mode="after")
    def _has_effect(self) -> "LossKL":
        rest = {name: info.default for name, info in LossKL.model_fields.items() if name != "coef"}
        idle = [name for name, default in rest.items() if getattr(self, name) != default]
        if not self.coef and idle:
            raise ConfigError([problem(name, getattr(self, name), "has no effect with coef=0.0") for name in idle])
        return self


class RewardKL(Section):
    """KL(policy || reference) as a cost of each token, taken from its reward."""

    coef: float = Field(0.0, ge=0)
    """Factor of the cost, at first if it adapts; 0 switches it off, and then no reference log-probs are computed."""
    estimator: Estimator = "k1"
    """As in the loss; k1 is the one whose expected value and gradient are both right here."""
    target_nats: float | None = Field(None, gt=0)
    """KL a token that the coefficient is steered to; None keeps it fixed."""
    horizon_sequences: int = Field(10_000, gt=0)
    """Sequences over which the coefficient can change by a factor of about 1.2; no effect without a target."""

    @model_validator(mode="after")
    def _has_effect(self) -> "RewardKL":
        problems = []
        if not self.coef and (self.estimator != "k1" or self.target_nats is not None):
            problems.append(problem("coef", self.coef, "the other settings have no effect without it"))
        if self.target_nats is None and self.horizon_sequences != RewardKL.model_fields["horizon_sequences"].default:
            rule = "has no effect without target_nats"
            problems.append(problem("horizon_sequences", self.horizon_sequences, rule))
        if problems:
            raise ConfigError(problems)
        return self


class RewardPenalty:
    """Charges tokens for their KL, and steers its coefficient where a target is set.

    Source: the controller is that of arXiv:1909.08593, section 2.2. Here its target is a token's KL rather than
    a completion's, so that it holds for any length.
    """

    def __init__(self, config: RewardKL) -> None:
        self.config = config
        self.coef = config.coef

    def costs(self, log_ratio_to_ref_T: Tensor) -> Tensor:
        """[T], what each token pays, under the coefficient as it stands."""
        return self.coef * estimate(log_ratio_to_ref_T, self.config.estimator)

    def steer(self, kl_nats: float, num_sequences: int) -> None:
        """Move the coefficient after a step that measured this KL a token on this many sequences."""
        if self.config.target_nats is None:
            return
        error = min(max(kl_nats / self.config.target_nats - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_sequences / self.config.horizon_sequences

    def state(self) -> dict[str, Any]:
        """The coefficient, where it moves."""
        return {} if self.config.target_nats is None else {"reward_kl_coef": self.coef}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the coefficient up again.

        Raises:
            CheckpointError: the state is that of a run with other settings.
        """
        expected = sorted(self.state())
        if sorted(state) != expected:
            remedy = "Resume with the settings of algorithm.reward_kl that the checkpoint was written under"
            raise CheckpointError(problem("algorithm.state", sorted(state), f"must have the keys {expected}", remedy))
        self.coef = float(state.get("reward_kl_coef", self.coef))


def estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """A one-sample estimate of KL(policy || other) in nats, from log policy - log other of a token the policy sampled.

    Source: J. Schulman, "Approximating KL divergence" (2020). Here the log ratio is bounded, so that all stay finite.

    Example:
        >>> [round(float(estimate(torch.tensor(0.5), k)), 4) for k in ("k1", "k2", "k3")]
        [0.5, 0.125, 0.1065]
    """
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return torch.expm1(-log_ratio) + log_ratio


def loss_kl(kl: LossKL, log_ratio_to_ref_T: Tensor, log_ratio_to_old_T: Tensor) -> Tensor:
    """[T], the KL term of each token, without its coefficient.

    Source: plain k3 is GRPO's (arXiv:2402.03300, eq. 4), whose gradient is that of the reverse divergence;
    straight_through keeps the estimator's value and takes the gradient of k2, which is the true one when tokens come
    from the policy itself; importance_weighted is DeepSeek-V3.2's (arXiv:2512.02556).
    """
    value_T = estimate(log_ratio_to_ref_T, kl.estimator)
    if kl.gradient == "plain":
        return value_T
    if kl.gradient == "importance_weighted":
        return value_T * log_ratio_to_old_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    slope_T = estimate(log_ratio_to_ref_T, "k2")
    return slope_T + (value_T - slope_T).detach()
