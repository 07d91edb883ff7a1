"""Base of the algorithms that judge a completion against the others of its prompt, in units of their spread."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from ebbtide.algorithms.judgement import group_deviation, group_std
from ebbtide.algorithms.policy_gradient import PolicyGradient
from ebbtide.errors import ConfigError, problem

__all__ = ["GroupRelative"]


class GroupRelative(PolicyGradient):
    """Advantages are rewards less their group's mean, over a standard deviation."""

    class Config(PolicyGradient.Config):
        """What all of them can be told."""

        min_group_size: ClassVar[int] = 2

        scale: Literal["group", "batch", "none"] = "group"
        """Whose standard deviation divides an advantage: its group's, that of the batch's rewards, or nobody's."""
        scale_eps: float = Field(1e-6, gt=0)
        """Added to that standard deviation."""

        @model_validator(mode="after")
        def _scale_has_effect(self) -> Self:
            if self.scale == "none" and self.scale_eps != GroupRelative.Config.model_fields["scale_eps"].default:
                raise ConfigError(problem("scale_eps", self.scale_eps, "has no effect with scale='none'"))
            return self

    config: Config

    def _judge(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        deviation_B = group_deviation(rewards_B, group_ids_B)
        if self.config.scale == "group":
            return deviation_B / (group_std(rewards_B, group_ids_B) + self.config.scale_eps)
        if self.config.scale == "batch":
            return deviation_B / (rewards_B.std() + self.config.scale_eps)
        return deviation_B
