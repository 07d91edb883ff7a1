"""AdamW, its schedule, and clipping, over whatever parameters an engine has."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ebbtide.recipe import OptimSection

__all__ = ["clip_gradients", "lr_factor", "make_optimizer"]


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], optim: OptimSection) -> torch.optim.AdamW:
    """AdamW over the parameters that require grad; weight decay only where there are two dimensions or more."""
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [item for item in trained if item.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [item for item in trained if item.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def lr_factor(optim: OptimSection, step: int, num_steps: int) -> float:
    """The learning rate of a step (counted from 0) as a share of the peak.

    Example:
        >>> optim = OptimSection(lr=1.0, schedule="linear", warmup_steps=2)
        >>> [lr_factor(optim, step, 6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - optim.warmup_steps) / max(1, num_steps - optim.warmup_steps))
    fall = progress if optim.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1.0 - (1.0 - optim.min_lr_ratio) * fall


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients down to `max_norm` together; their norm before that, a scalar."""
    owned = [parameter for parameter in parameters if parameter.grad is not None]
    if max_norm is None:
        return torch.nn.utils.get_total_norm([item.grad for item in owned if item.grad is not None])
    return torch.nn.utils.clip_grad_norm_(owned, max_norm)
