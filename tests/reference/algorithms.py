"""The losses and advantages of the papers, written out token by token in float64; slow, and nothing shared with src."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Sample",
    "aggregate",
    "cispo_loss",
    "clipped_loss",
    "gae_by_definition",
    "gpg_advantages",
    "group_advantages",
    "gspo_loss",
    "kl_terms",
    "policy_gradient_loss",
    "returns_by_definition",
    "rloo_advantages",
    "standardized",
    "value_loss",
]


@dataclass(frozen=True)
class Sample:
    """One completion: what each of its trained tokens carries, [C] float64.

    `policy` (or `values`, for a critic) requires grad.
    """

    policy: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor


def group_advantages(rewards: Sequence[Sequence[float]], eps: float, *, divide: bool = True) -> list[list[float]]:
    """GRPO, arXiv:2402.03300: (r - mean) / std within each group; Dr. GRPO leaves the division out."""
    result = []
    for group in rewards:
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        result.append([(r - mean) / (std + eps) if divide else r - mean for r in group])
    return result


def rloo_advantages(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """RLOO, arXiv:2402.14740: r minus the mean of the other completions' rewards."""
    return [
        [r - sum(other for j, other in enumerate(group) if j != i) / (len(group) - 1) for i, r in enumerate(group)]
        for group in rewards
    ]


def gpg_advantages(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """GPG, arXiv:2504.02546: deviations, times all completions over those in groups that differ."""
    total = sum(len(group) for group in rewards)
    useful = sum(len(group) for group in rewards if len(set(group)) > 1)
    return [[(r - sum(group) / len(group)) * total / useful if useful else 0.0 for r in group] for group in rewards]


def returns_by_definition(rewards: Sequence[float], gamma: float) -> list[float]:
    """The sum over l of gamma^l r[t + l], for each t."""
    return [sum(gamma**ahead * rewards[t + ahead] for ahead in range(len(rewards) - t)) for t in range(len(rewards))]


def gae_by_definition(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """arXiv:1506.02438, eq. 16: the sum over l of (gamma lam)^l delta[t + l], a value after the last token being 0."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return returns_by_definition(deltas, gamma * lam)


def standardized(tokens: Sequence[float]) -> list[float]:
    """(x - mean) / std over n - 1."""
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1))
    return [(x - mean) / std for x in tokens]


def aggregate(losses: Sequence[Tensor], how: str, max_tokens: int) -> Tensor:
    """One [C] tensor a sequence, to a scalar. Sequences without a token count nowhere."""
    losses = [loss for loss in losses if len(loss)]
    totals = [loss.sum() for loss in losses]
    if how == "token_mean":
        return sum(totals, torch.zeros(())) / sum(len(loss) for loss in losses)
    if how == "sequence_mean":
        return sum((loss.mean() for loss in losses), torch.zeros(())) / len(losses)
    scale = max_tokens if how == "constant" else 1
    return sum(totals, torch.zeros(())) / (len(losses) * scale)


def clipped_loss(low: float, high: float, dual: float | None = None) -> Callable[[Sample], Tensor]:
    """PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729, eq. 5."""

    def one_token(ratio: Tensor, advantage: Tensor) -> Tensor:
        bounded = torch.clamp(ratio, 1 - low, 1 + high)
        objective = torch.min(ratio * advantage, bounded * advantage)
        if dual is not None and advantage < 0:
            objective = torch.max(objective, dual * advantage)
        return -objective

    def one_sample(sample: Sample) -> Tensor:
        ratios = torch.exp(sample.policy - sample.old)
        return torch.stack([one_token(r, a) for r, a in zip(ratios, sample.advantages, strict=True)])

    return one_sample


def gspo_loss(low: float, high: float) -> Callable[[Sample], Tensor]:
    """GSPO, arXiv:2507.18071, eq. 5 and 7: one ratio and one advantage a sequence, said once for each of its tokens."""

    def one_sample(sample: Sample) -> Tensor:
        ratio = torch.exp((sample.policy - sample.old).sum() / len(sample.policy))
        advantage = sample.advantages[0]
        objective = torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
        return -objective.expand(len(sample.policy))

    return one_sample


def cispo_loss(least: float, most: float) -> Callable[[Sample], Tensor]:
    """CISPO, arXiv:2506.13585, eq. 4: log-probs weighed by bounded ratios that carry no gradient."""

    def one_sample(sample: Sample) -> Tensor:
        weights = torch.exp(sample.policy - sample.old).detach().clamp(least, most)
        return -weights * sample.advantages * sample.policy

    return one_sample


def policy_gradient_loss(sample: Sample) -> Tensor:
    """REINFORCE: minus advantage times log-prob."""
    return -sample.advantages * sample.policy


def value_loss(clip: float) -> Callable[[Sample], Tensor]:
    """Half the larger squared error of the value and of the value held near the old one."""

    def one_sample(sample: Sample) -> Tensor:
        losses = []
        for value, old, target in zip(sample.values, sample.old_values, sample.returns, strict=True):
            near = old + torch.clamp(value - old, -clip, clip)
            losses.append(0.5 * torch.max((value - target) ** 2, (near - target) ** 2))
        return torch.stack(losses)

    return one_sample


def kl_terms(sample: Sample, estimator: str, gradient: str) -> Tensor:
    """KL(policy || ref) of each token: k1 = log p - log q, k2 = k1^2 / 2, k3 = q / p - 1 - log(q / p)."""
    k1 = sample.policy - sample.ref
    k2 = k1**2 / 2
    k3 = torch.exp(sample.ref - sample.policy) - 1 - (sample.ref - sample.policy)
    value = {"k1": k1, "k2": k2, "k3": k3}[estimator]
    if gradient == "straight_through":
        return value.detach() + k2 - k2.detach()
    if gradient == "importance_weighted":
        return torch.exp(sample.policy - sample.old) * value
    return value
