"""Rollout correction: the rollout sampled from another policy than the one that is trained on; weigh tokens for it.

Two causes: another engine computed the log-probs, or older weights sampled. Where the old policy is `recomputed` (the
decoupled form) the ratio is old / rollout, known before the update, and the weights go into the advantages of the
global batch. Where it is the `rollout` (the bypass form) the ratio is policy / rollout, known in the loss alone.
"""

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from ebbtide.algorithms.penalty import LOG_RATIO_BOUND, estimate
from ebbtide.algorithms.reduction import Packed
from ebbtide.config import Section
from ebbtide.errors import ConfigError, problem
from ebbtide.types import Ratio

__all__ = ["Correction", "correct", "effective_sample_ratio"]

Level = Literal["none", "token", "sequence", "sequence_mean"]


class Correction(Section):
    """What is done about a ratio that is not 1. Both parts are off by default; together they mask what is truncated."""

    weight: Level = "none"
    """Weigh by the ratio of each token, of the whole sequence (their product), or of its geometric mean."""
    max_weight: float = Field(2.0, ge=1)
    """Weights are truncated to this."""
    normalize: bool = False
    """Divide the weights by their mean over the batch's tokens, so that correction leaves the step's size as it is."""
    reject: Level = "none"
    """Leave out tokens, or sequences, whose ratio is out of bounds. They weigh 0 and stay in the loss's counts."""
    reject_below: float = Field(0.0, ge=0)
    """Least ratio that is accepted."""
    reject_above: float = Field(2.0, gt=0)
    """Largest ratio that is accepted."""
    veto_below: float = Field(0.0, ge=0)
    """Leave out a whole sequence if one of its tokens has a ratio under this; 0 vetoes nothing."""

    @model_validator(mode="after")
    def _has_effect(self) -> "Correction":
        defaults = {name: info.default for name, info in Correction.model_fields.items()}
        idle = {"weight": ("max_weight", "normalize"), "reject": ("reject_below", "reject_above")}
        problems = [
            problem(name, getattr(self, name), f"has no effect with {switch}='none'")
            for switch, names in idle.items()
            for name in names
            if getattr(self, switch) == "none" and getattr(self, name) != defaults[name]
        ]
        if self.reject_below >= self.reject_above:
            problems.append(
                problem("reject_below", self.reject_below, f"must be below reject_above={self.reject_above}")
            )
        if problems:
            raise ConfigError(problems)
        return self

    @property
    def is_active(self) -> bool:
        """Whether any token may get a weight other than 1."""
        return self.weight != "none" or self.reject != "none" or self.veto_below > 0


def correct(log_ratio_T: Tensor, packed: Packed, config: Correction) -> tuple[Tensor, dict[str, Ratio]]:
    """[T] weights without gradient, 0 where not trained; and how far the two policies stand apart.

    Args:
        log_ratio_T: [T], log of the trained policy over the rollout's, 0 where not trained.
        packed: the layout.
        config: what to do about it.

    Source: truncated: IMPALA, arXiv:1802.01561, eq. 1, and for language models https://fengyao.notion.site/off-policy-rl
    (2025); sequence and rejection: J. Liu and others, "When Speed Kills Stability" (2025); masked tokens: IcePop,
    arXiv:2510.18855; geometric mean: arXiv:2507.18071, eq. 7. Here what is rejected stays in the loss's counts, so
    that a step that rejects much is a smaller step.
    """
    log_ratio_T = log_ratio_T.detach()
    ratio_T = _ratio(log_ratio_T, packed, "token" if config.weight == "none" else config.weight)
    trained_T = packed.loss_mask.to(ratio_T.dtype)
    weights_T = trained_T if config.weight == "none" else ratio_T.clamp(max=config.max_weight) * trained_T
    truncated_T = (ratio_T > config.max_weight) & (config.weight != "none")
    kept_T = packed.loss_mask
    if config.reject != "none":
        judged_T = _ratio(log_ratio_T, packed, config.reject)
        kept_T = kept_T & (judged_T >= config.reject_below) & (judged_T <= config.reject_above)
    if config.veto_below > 0:
        vetoes_T = packed.loss_mask & (log_ratio_T.exp() < config.veto_below)
        kept_T = kept_T & (packed.per_sequence(vetoes_T.to(ratio_T.dtype)) == 0)[packed.sequence_ids]
    metrics = {
        "correction/ratio_mean": packed.mean(ratio_T * trained_T),
        "correction/ratio_square_mean": packed.mean(ratio_T**2 * trained_T),
        "correction/truncated_ratio": packed.mean(truncated_T & packed.loss_mask),
        "correction/rejected_ratio": packed.mean(packed.loss_mask & ~kept_T),
        "correction/kl_nats": packed.mean(estimate(-log_ratio_T, "k3")),
    }
    return weights_T * kept_T, metrics


def effective_sample_ratio(weights_T: Tensor, packed: Packed) -> Ratio:
    """Effective samples over samples: (sum of w)^2 / (n x sum of w^2), over all trained tokens of the batch given.

    Example:
        >>> import torch
        >>> packed = Packed(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
        >>> effective_sample_ratio(torch.tensor([1.0, 0.0]), packed).value
        0.5
    """
    weights_T = weights_T.double()
    return Ratio(weights_T.sum() ** 2, packed.loss_mask.sum() * (weights_T**2).sum())


def _ratio(log_ratio_T: Tensor, packed: Packed, level: Level) -> Tensor:
    if level == "token":
        return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    log_ratio_B = packed.per_sequence(log_ratio_T)
    if level == "sequence_mean":
        log_ratio_B = log_ratio_B / packed.lengths(log_ratio_B)
    return log_ratio_B.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[packed.sequence_ids]
