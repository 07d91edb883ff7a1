"""AdamW, its schedule, and clipping, over weights that may be divided among ranks in different ways."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ebbtide.engines.mesh import AXES, Ranks
from ebbtide.engines.sharding import num_shards
from ebbtide.recipe import OptimSection

__all__ = ["gradient_norm", "local_gradients", "lr_factor", "make_optimizer", "scale_gradients"]


def make_optimizer(parameters: Iterable[nn.Parameter], optim: OptimSection) -> torch.optim.AdamW:
    """AdamW over the parameters that require grad; weight decay only where there are two dimensions or more."""
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            # One fused step takes tensors of one mesh.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.dim() >= 2, mesh), []).append(parameter)
    described = [
        {"params": members, "weight_decay": optim.weight_decay if decays else 0.0}
        for (decays, _), members in groups.items()
    ]
    return torch.optim.AdamW(described, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


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


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's part of each gradient that there is."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def gradient_norm(parameters: Sequence[nn.Parameter], ranks: Ranks) -> float:
    """Norm of the whole gradient over all ranks, whatever the axes that its parts are divided along.

    Each rank adds its squares, divided by the number of ranks that hold the same ones: of a stage's ranks all that do
    not share the weight's division.
    """
    by_copies: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        copies = ranks.num // ranks.size("pp") // num_shards(parameter)
        by_copies.setdefault(copies, []).append(parameter)
    square = torch.zeros((), dtype=torch.float64, device=ranks.device.torch)
    for copies, members in by_copies.items():
        parts = local_gradients(members)
        if parts:
            norms = torch.stack(torch._foreach_norm(parts, 2, torch.float32))
            square += norms.double().square().sum() / copies
    return math.sqrt(float(ranks.reduce(square, *AXES)))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient, in place."""
    parts = local_gradients(parameters)
    if parts:
        torch._foreach_mul_(parts, factor)
