"""CISPO: the bound holds a token's weight but never its gradient, so that no token is left out of the update."""

from typing import ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from ebbtide.algorithms.group_relative import GroupRelative
from ebbtide.algorithms.policy_gradient import Metrics, Tokens
from ebbtide.errors import ConfigError, problem

__all__ = ["CISPO"]


class CISPO(GroupRelative):
    """Clipped Importance Sampling weight Policy Optimization.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. Here the bounds are on the ratio itself; the paper names no
    number for the upper one, and 5 is that of ScaleRL (arXiv:2510.13786).
    """

    class Config(GroupRelative.Config):
        """Settings of CISPO."""

        weighs_by_ratio: ClassVar[bool] = True

        type: str = "cispo"
        min_ratio: float = Field(0.0, ge=0)
        """Least weight of a token; 0 sets no bound, as in the paper."""
        max_ratio: float = Field(5.0, gt=0)
        """Largest weight of a token."""

        @model_validator(mode="after")
        def _in_order(self) -> Self:
            if self.min_ratio >= self.max_ratio:
                raise ConfigError(problem("min_ratio", self.min_ratio, f"must be below max_ratio={self.max_ratio}"))
            return self

    config: Config

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio_T = tokens.log_ratio.detach().exp()
        weights_T = ratio_T.clamp(self.config.min_ratio, self.config.max_ratio)
        metrics = {
            "policy/ratio_mean": tokens.packed.mean(tokens.packed.trained(ratio_T)),
            "policy/clipped_ratio": tokens.packed.mean(tokens.packed.trained((weights_T != ratio_T).to(ratio_T.dtype))),
        }
        return -weights_T * tokens.advantages * tokens.logprobs, metrics
