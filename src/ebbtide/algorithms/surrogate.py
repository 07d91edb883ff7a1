"""The clipped surrogate objective of PPO, one number a token, as several algorithms use it."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ebbtide.algorithms.policy_gradient import PolicyGradient
from ebbtide.algorithms.reduction import Packed
from ebbtide.types import Ratio

__all__ = ["ClippedConfig", "clipped_surrogate"]


class ClippedConfig(PolicyGradient.Config):
    """Base of the `Config` of algorithms that clip the ratio policy / old policy."""

    weighs_by_ratio: ClassVar[bool] = True

    clip_low: float = Field(0.2, gt=0, le=1)
    """Below 1 - clip_low the ratio earns nothing more."""
    clip_high: float = Field(0.2, gt=0)
    """Above 1 + clip_high the ratio earns nothing more."""
    clip_dual: float | None = Field(None, gt=1)
    """Bound on the ratio of tokens with a negative advantage, whose loss would grow without end; None sets none."""


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, packed: Packed, config: ClippedConfig
) -> tuple[Tensor, dict[str, Ratio]]:
    """[T] loss -min(ratio A, clip(ratio) A), and the shares of tokens that either bound holds.

    Args:
        ratio_T: [T] with gradient, policy / old policy, 1 where not trained.
        advantages_T: [T], 0 where not trained.
        packed: the layout.
        config: the bounds.

    Source: PPO, arXiv:1707.06347, eq. 7; two bounds: DAPO, arXiv:2503.14476, eq. 10; dual: arXiv:1912.09729, eq. 5.
    """
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_T
    loss_T = torch.maximum(plain_T, clipped_T)
    held_T = clipped_T.detach() > plain_T.detach()
    metrics = {
        "policy/ratio_mean": packed.mean(torch.where(packed.loss_mask, ratio_T.detach(), 0.0)),
        "policy/clipped_low_ratio": packed.mean((held_T & (advantages_T < 0)).to(loss_T.dtype)),
        "policy/clipped_high_ratio": packed.mean((held_T & (advantages_T > 0)).to(loss_T.dtype)),
    }
    if config.clip_dual is not None:
        bound_T = -config.clip_dual * advantages_T
        capped_T = (advantages_T < 0) & (loss_T.detach() > bound_T)
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, bound_T), loss_T)
        metrics["policy/clipped_dual_ratio"] = packed.mean(capped_T.to(loss_T.dtype))
    return loss_T, metrics
