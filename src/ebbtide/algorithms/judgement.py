"""Rewards to advantages, one number a completion: against the group, against the others of it, against the batch.

All take `rewards_B` [B] and `group_ids_B` [B] int64 (0 .. number of groups - 1) and compute in float64, where the mean
of equal rewards is that reward exactly: a group that agrees gets advantages of exactly zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.types import Group

__all__ = ["flatten", "group_deviation", "group_mean_of_others", "group_std", "split", "standardize"]


def flatten(groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Rewards [B] float64 and group ids [B] int64 of scored groups, laid end to end."""
    rewards = [group.rewards for group in groups if group.rewards is not None]
    assert len(rewards) == len(groups), "groups are scored before they are judged"
    sizes = torch.tensor([len(reward) for reward in rewards], dtype=torch.int64)
    rewards_B = torch.cat(rewards).double() if rewards else torch.zeros(0, dtype=torch.float64)
    return rewards_B, torch.repeat_interleave(torch.arange(len(rewards)), sizes)


def split(advantages_B: Tensor, groups: Sequence[Group]) -> list[list[Tensor]]:
    """[B] back into one float32 scalar a completion, group by group."""
    scalars = iter(advantages_B.float().unbind())
    return [[next(scalars) for _ in group.completions] for group in groups]


def group_deviation(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """[B], each reward minus the mean of its group.

    Example:
        >>> group_deviation(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1])).tolist()
        [0.5, -0.5, 0.0]
    """
    sums_G, sizes_G = _group_sums(rewards_B, group_ids_B)
    return rewards_B.double() - (sums_G / sizes_G)[group_ids_B]


def group_mean_of_others(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """[B], for each completion the mean reward of the other completions of its group; 0 where there is no other.

    Example:
        >>> group_mean_of_others(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 0])).tolist()
        [1.5, 2.0, 0.5]
    """
    sums_G, sizes_G = _group_sums(rewards_B, group_ids_B)
    return (sums_G[group_ids_B] - rewards_B.double()) / (sizes_G[group_ids_B] - 1).clamp(min=1)


def group_std(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """[B], standard deviation of each completion's group, over G - 1; 0 in a group of one.

    Example:
        >>> group_std(torch.tensor([1.0, 3.0]), torch.tensor([0, 0])).tolist()
        [1.4142135623730951, 1.4142135623730951]
    """
    squares_G, sizes_G = _group_sums(group_deviation(rewards_B, group_ids_B) ** 2, group_ids_B)
    return (squares_G / (sizes_G - 1).clamp(min=1)).sqrt()[group_ids_B]


def standardize(values: Tensor, weights: Tensor, eps: float) -> Tensor:
    """(values - mean) / (std + eps), mean and std (over n - 1) taken over the weights, which count each value.

    Example:
        >>> standardize(torch.tensor([1.0, 3.0]), torch.ones(2), eps=0.0).tolist()
        [-0.7071067811865475, 0.7071067811865475]
    """
    values, weights = values.double(), weights.double()
    count = weights.sum().clamp(min=1)
    deviation = values - (values * weights).sum() / count
    variance = (deviation**2 * weights).sum() / (count - 1).clamp(min=1)
    return deviation / (variance.sqrt() + eps)


def _group_sums(values_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    num_groups = int(group_ids_B.max()) + 1 if len(group_ids_B) else 0
    zeros_G = torch.zeros(num_groups, dtype=torch.float64, device=values_B.device)
    sizes_G = zeros_G.index_add(0, group_ids_B, torch.ones_like(values_B, dtype=torch.float64))
    return zeros_G.index_add(0, group_ids_B, values_B.double()), sizes_G.clamp(min=1)
