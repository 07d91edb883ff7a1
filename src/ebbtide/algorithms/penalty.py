"""The pull towards the reference policy as a term of the loss, and the estimators of KL that it is measured with."""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ebbtide.config import Section
from ebbtide.errors import ConfigError, problem

__all__ = ["LOG_RATIO_BOUND", "Estimator", "LossKL", "estimate", "loss_kl"]

LOG_RATIO_BOUND = 20.0  # exp of it is 4.9e8: far beyond any clip, and its square still finite in float32

Estimator = Literal["k1", "k2", "k3"]


class LossKL(Section):
    """KL(policy || reference) as a term of the loss."""

    coef: float = Field(0.0, ge=0)
    """Factor of the KL term; 0 switches it off, and then no reference log-probs are computed."""
    estimator: Estimator = "k3"
    """k1 = log ratio; k2 = half its square; k3 = exp(-k1) - 1 + k1, never negative and of low variance."""
    gradient: Literal["plain", "straight_through", "importance_weighted"] = "plain"
    """plain: the estimator's own. straight_through: that of k2, unbiased on-policy. importance_weighted: unbiased too
    when the old policy sampled, by the factor policy / old policy."""

    @model_validator(mode="after")
    def _has_effect(self) -> "LossKL":
        rest = {name: info.default for name, info in LossKL.model_fields.items() if name != "coef"}
        idle = [name for name, default in rest.items() if getattr(self, name) != default]
        if not self.coef and idle:
            raise ConfigError([problem(name, getattr(self, name), "has no effect with coef=0.0") for name in idle])
        return self


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
