"""DAPO: GRPO with a wider upper bound, groups without contrast replaced, and a soft penalty before the token limit."""

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator
from torch import Tensor

from ebbtide.algorithms.grpo import GRPO
from ebbtide.algorithms.policy_gradient import Metrics
from ebbtide.algorithms.reduction import Aggregation, Packed
from ebbtide.errors import ConfigError, problem
from ebbtide.types import BatchCounts, Group, TrainBatch

__all__ = ["DAPO"]


class DAPO(GRPO):
    """Decoupled Clip and Dynamic sAmpling Policy Optimization.

    Source: arXiv:2503.14476, eq. 8 (objective), 11 (dynamic sampling) and 13 (overlong penalty). Here a group is
    dropped when its rewards are equal, whatever they are, where the paper drops those of accuracy 0 and 1; and after
    `max_refills` rounds a step trains on what it has, where the paper samples without end.
    """

    class Config(GRPO.Config):
        """Settings of DAPO."""

        type: str = "dapo"
        aggregation: Aggregation = "token_mean"
        """As in GRPO; token_mean is the paper's."""
        clip_high: float = Field(0.28, gt=0)
        """As in GRPO; wider than clip_low, so that unlikely tokens can grow."""
        max_refills: int = Field(3, ge=0)
        """Rounds of generation that may replace groups whose rewards are all equal; 0 trains without them."""
        overlong_buffer_tokens: int = Field(0, ge=0)
        """The last tokens before sampling.max_tokens, over which the penalty grows; 0 charges none."""
        overlong_penalty: float = Field(1.0, gt=0)
        """Penalty of a completion that reaches sampling.max_tokens."""

        @model_validator(mode="after")
        def _penalty_has_effect(self) -> Self:
            if not self.overlong_buffer_tokens and self.overlong_penalty != 1.0:
                rule = "has no effect with overlong_buffer_tokens=0"
                raise ConfigError(problem("overlong_penalty", self.overlong_penalty, rule))
            return self

    config: Config

    @property
    def max_refills(self) -> int:
        """As configured."""
        return self.config.max_refills

    def keep(self, group: Group) -> bool:
        """Whether the group's rewards differ."""
        return group.rewards is not None and bool((group.rewards != group.rewards[0]).any())

    def prepare(self, batch: TrainBatch, counts: BatchCounts) -> tuple[TrainBatch, Metrics]:
        """Judge anew with the penalty in the reward, where one is charged."""
        if self.config.overlong_buffer_tokens:
            packed = Packed.of(batch)
            rewards_B = batch.rewards.double() - self._overlong(packed, counts.max_completion_tokens)
            advantages_B = self._judge(rewards_B, batch.group_ids.long()).float()
            batch = replace(batch, advantages=packed.trained(advantages_B[packed.sequence_ids]))
        return super().prepare(batch, counts)

    def _overlong(self, packed: Packed, max_tokens: int) -> Tensor:
        """[B] float64 penalties: 0 until the buffer begins, then growing linearly to the full one at the limit."""
        buffer = self.config.overlong_buffer_tokens
        if buffer > max_tokens:
            rule = f"must not exceed sampling.max_tokens={max_tokens}"
            raise ConfigError(problem("algorithm.overlong_buffer_tokens", buffer, rule))
        lengths_B = packed.per_sequence(packed.loss_mask.double())
        return ((lengths_B - (max_tokens - buffer)) / buffer).clamp(0, 1) * self.config.overlong_penalty
