"""REINFORCE++ with a baseline: rewards less their group's mean, standardized over the whole batch."""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from ebbtide.algorithms.judgement import group_deviation, standardize
from ebbtide.algorithms.policy_gradient import Metrics, PolicyGradient, Tokens
from ebbtide.algorithms.reduction import Packed
from ebbtide.algorithms.surrogate import ClippedConfig, clipped_surrogate
from ebbtide.types import BatchCounts, TrainBatch

__all__ = ["ReinforcePPBaseline"]


class ReinforcePPBaseline(PolicyGradient):
    """REINFORCE++ with the mean of a completion's group as its baseline.

    Source: arXiv:2501.03262, REINFORCE++ with baseline: the deviation from the group's mean is standardized over
    all tokens of the global batch; its KL term is k2 in the loss. Here that term is off until `kl.coef` is set.
    """

    class Config(ClippedConfig):
        """Settings of REINFORCE++ with a baseline."""

        min_group_size: ClassVar[int] = 2

        type: str = "reinforce_pp_baseline"
        scale_eps: float = Field(1e-8, gt=0)
        """Added to the batch's standard deviation."""

    config: Config

    def prepare(self, batch: TrainBatch, counts: BatchCounts) -> tuple[TrainBatch, Metrics]:
        """Standardize the deviations over the batch's tokens, then correct."""
        packed = Packed.of(batch)
        advantages_T = standardize(packed.trained(batch.advantages), packed.loss_mask, self.config.scale_eps)
        return super().prepare(replace(batch, advantages=packed.trained(advantages_T.float())), counts)

    def _judge(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        return group_deviation(rewards_B, group_ids_B)

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, tokens.packed, self.config)
