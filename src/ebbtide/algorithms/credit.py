"""Rewards of tokens to advantages of tokens: sums over what is still to come, within each sequence, all at once."""

import torch
from torch import Tensor

from ebbtide.algorithms.reduction import Packed

__all__ = ["gae", "outcome_rewards", "rewards_to_go"]


def outcome_rewards(rewards_B: Tensor, packed: Packed) -> Tensor:
    """[T] float64, each sequence's reward on its last trained token and 0 elsewhere."""
    rewards_T = torch.zeros(len(packed.loss_mask), dtype=torch.float64, device=rewards_B.device)
    index_N = packed.loss_mask.nonzero()[:, 0]
    sequence_ids_N = packed.sequence_ids[index_N]
    last_N = torch.ones_like(index_N, dtype=torch.bool)
    last_N[:-1] = sequence_ids_N[1:] != sequence_ids_N[:-1]
    rewards_T[index_N[last_N]] = rewards_B[sequence_ids_N[last_N]].double()
    return rewards_T


def rewards_to_go(rewards_T: Tensor, packed: Packed, gamma: float) -> Tensor:
    """[T] float64, each trained token's reward plus gamma times that of the next one, and so on; 0 where not trained.

    Tokens between two trained ones that are not trained themselves, such as a tool's answer, take no time.
    """
    index_N = packed.loss_mask.nonzero()[:, 0]
    sums_N = _discounted_sums(rewards_T[index_N].double(), packed.sequence_ids[index_N], gamma)
    return torch.zeros_like(rewards_T, dtype=torch.float64).index_put((index_N,), sums_N)


def gae(rewards_T: Tensor, values_T: Tensor, packed: Packed, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages [T] and returns [T], float64, 0 where not trained.

    Args:
        rewards_T: [T], what each token earned.
        values_T: [T], the critic's value of the state in which each token was chosen.
        packed: the layout.
        gamma: discount of a token, in (0, 1].
        lam: 0 trusts the critic alone, 1 the rewards alone.

    Source: generalized advantage estimation, arXiv:1506.02438, eq. 16; returns = advantages + values.
    """
    index_N = packed.loss_mask.nonzero()[:, 0]
    sequence_ids_N, values_N = packed.sequence_ids[index_N], values_T[index_N].double()
    next_values_N = torch.zeros_like(values_N)
    next_values_N[:-1] = values_N[1:] * (sequence_ids_N[1:] == sequence_ids_N[:-1])
    errors_N = rewards_T[index_N].double() + gamma * next_values_N - values_N
    advantages_N = _discounted_sums(errors_N, sequence_ids_N, gamma * lam)
    zeros_T = torch.zeros_like(rewards_T, dtype=torch.float64)
    return zeros_T.index_put((index_N,), advantages_N), zeros_T.index_put((index_N,), advantages_N + values_N)


def _discounted_sums(values_N: Tensor, sequence_ids_N: Tensor, factor: float) -> Tensor:
    """y[n] = x[n] + factor * y[n + 1] within each sequence, in log2(longest) rounds that each double the reach."""
    sums_N = values_N.clone()
    longest = int(torch.bincount(sequence_ids_N).max()) if len(values_N) else 0
    reach = 1
    while reach < longest and factor:
        same_N = sequence_ids_N[reach:] == sequence_ids_N[:-reach]
        sums_N[:-reach] += factor**reach * sums_N[reach:].clone() * same_N
        reach *= 2
    return sums_N
