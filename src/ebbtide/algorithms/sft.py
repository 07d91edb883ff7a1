"""SFT: the likelihood of completions, of all of them or of those that earned enough (rejection sampling)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ebbtide.algorithms.base import AlgorithmConfig, LossInputs, Needs, check_groups, refuse_state
from ebbtide.algorithms.reduction import Packed
from ebbtide.types import BatchCounts, Group, Ratio, TrainBatch

__all__ = ["SFT"]


class SFT:
    """Supervised fine-tuning on the batch's completions.

    Source: maximum likelihood; with `min_reward` it is rejection sampling fine-tuning, as in RAFT (arXiv:2304.06767).
    Here what is left out is known after packing alone, so that weights are scaled to a mean of 1.
    """

    class Config(AlgorithmConfig):
        """Settings of SFT."""

        type: str = "sft"
        aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
        """Whether each token weighs the same, or each sequence."""
        min_reward: float | None = None
        """Learn from completions with at least this reward; None learns from all."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs.NOTHING

    @property
    def max_refills(self) -> int:
        """0: no group is dropped."""
        return 0

    def keep(self, group: Group) -> bool:  # noqa: ARG002
        """Every group."""
        return True

    def advantages(self, groups: Sequence[Group]) -> list[list[Tensor]]:
        """1 for a completion to learn from, 0 for the others.

        Raises:
            DataError: a group's rewards are missing or not finite.
        """
        check_groups(groups, self.config.min_group_size)
        threshold = float("-inf") if self.config.min_reward is None else self.config.min_reward
        return [list((group.rewards >= threshold).float().unbind()) for group in groups if group.rewards is not None]

    def prepare(self, batch: TrainBatch, counts: BatchCounts) -> tuple[TrainBatch, dict[str, Ratio]]:
        """Scale the weights so that the loss is a mean over what is learned from."""
        packed = Packed.of(batch)
        weights_T = packed.trained(batch.advantages)
        mean = packed.share_of_loss(weights_T, counts, self.config.aggregation)
        scaled_T = weights_T / mean if bool(mean > 0) else weights_T
        return replace(batch, advantages=scaled_T), {"policy/learned_ratio": packed.mean(weights_T)}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Ratio]]:
        """Weighted negative log-likelihood."""
        packed = Packed.of(inputs.batch)
        nll_T = -packed.trained(inputs.policy_logprobs)
        weights_T = packed.trained(inputs.batch.advantages)
        learned_T = torch.where(weights_T > 0, nll_T.detach(), 0.0)
        metrics = {"policy/nll_nats": Ratio(learned_T.sum(), (weights_T > 0).sum())}
        return packed.share_of_loss(weights_T * nll_T, inputs.counts, self.config.aggregation), metrics

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to continue from."""
        refuse_state(self, state)
