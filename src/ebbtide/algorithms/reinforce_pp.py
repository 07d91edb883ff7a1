"""REINFORCE++: PPO without a critic; advantages are rewards to go, standardized over the whole batch."""

from dataclasses import replace

from pydantic import Field
from torch import Tensor

from ebbtide.algorithms.credit import rewards_to_go
from ebbtide.algorithms.judgement import standardize
from ebbtide.algorithms.policy_gradient import Metrics, Tokens
from ebbtide.algorithms.reduction import Packed
from ebbtide.algorithms.surrogate import ClippedConfig, clipped_surrogate
from ebbtide.algorithms.token_reward import TokenReward
from ebbtide.types import TrainBatch

__all__ = ["ReinforcePP"]


class ReinforcePP(TokenReward):
    """REINFORCE++.

    Source: arXiv:2501.03262, global advantage normalization: each token pays its k1 KL to the reference, and rewards to
    go are standardized over all tokens of the global batch. Here the KL is off until `reward_kl.coef` is set, and
    gamma may be below 1.
    """

    class Config(TokenReward.Config, ClippedConfig):
        """Settings of REINFORCE++."""

        type: str = "reinforce_pp"
        gamma: float = Field(1.0, gt=0, le=1)
        """Discount of each token that lies between an action and its reward."""
        scale_eps: float = Field(1e-8, gt=0)
        """Added to the batch's standard deviation."""

    config: Config

    def _credit(self, rewards_T: Tensor, batch: TrainBatch, packed: Packed) -> TrainBatch:
        returns_T = rewards_to_go(rewards_T, packed, self.config.gamma)
        advantages_T = standardize(returns_T, packed.loss_mask, self.config.scale_eps)
        return replace(batch, advantages=packed.trained(advantages_T.float()))

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, tokens.packed, self.config)
