"""GRPO: a completion is judged against the others of its prompt, and a clipped ratio limits how far it moves."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from ebbtide.algorithms.judgement import group_deviation, group_std
from ebbtide.algorithms.policy_gradient import Metrics, PolicyGradient, Tokens
from ebbtide.algorithms.surrogate import ClippedConfig, clipped_surrogate

__all__ = ["GRPO"]


class GRPO(PolicyGradient):
    """Group Relative Policy Optimization.

    Source: DeepSeekMath, arXiv:2402.03300, eq. 3 (objective) and section 4.1.2 (advantages). Here tokens weigh the
    same by default, as in DAPO, where the paper weighs sequences the same (aggregation = "sequence_mean"); the KL term
    is off by default; and the standard deviation is over G - 1.
    """

    class Config(ClippedConfig):
        """Settings of GRPO."""

        min_group_size: ClassVar[int] = 2

        type: str = "grpo"
        scale: Literal["group", "batch", "none"] = "group"
        """Whose standard deviation divides an advantage: its group's, that of the batch's rewards, or nobody's."""
        scale_eps: float = Field(1e-6, gt=0)
        """Added to that standard deviation."""

    config: Config

    def _judge(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        deviation_B = group_deviation(rewards_B, group_ids_B)
        if self.config.scale == "group":
            return deviation_B / (group_std(rewards_B, group_ids_B) + self.config.scale_eps)
        if self.config.scale == "batch":
            return deviation_B / (rewards_B.std() + self.config.scale_eps)
        return deviation_B

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, tokens.packed, self.config)
