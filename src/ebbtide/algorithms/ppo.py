"""PPO: a critic judges every state, and its errors, summed with a decay, are the advantages."""

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ebbtide.algorithms.base import LossInputs, Needs
from ebbtide.algorithms.credit import gae
from ebbtide.algorithms.judgement import standardize
from ebbtide.algorithms.policy_gradient import Metrics, Tokens, given
from ebbtide.algorithms.reduction import Packed
from ebbtide.algorithms.surrogate import ClippedConfig, clipped_surrogate
from ebbtide.algorithms.token_reward import TokenReward
from ebbtide.types import TrainBatch

__all__ = ["PPO"]


class PPO(TokenReward):
    """Proximal Policy Optimization with a critic.

    Source: arXiv:1707.06347, eq. 7 and 9, with the advantages of arXiv:1506.02438, eq. 16; KL in the reward as in
    arXiv:2203.02155, section 3.5. Here policy and critic learn from losses of their own, and the KL is off until
    `reward_kl.coef` is set.
    """

    class Config(TokenReward.Config, ClippedConfig):
        """Settings of PPO."""

        has_critic: ClassVar[bool] = True

        type: str = "ppo"
        gamma: float = Field(1.0, gt=0, le=1)
        """Discount of each token that lies between an action and its reward."""
        lam: float = Field(1.0, ge=0, le=1)
        """GAE's decay: 0 trusts the critic alone, 1 the rewards alone."""
        whiten: bool = True
        """Standardize advantages over all tokens of the batch."""
        value_clip: float | None = Field(0.2, gt=0)
        """How far a value may move from what it was before the update and still gain; None sets no bound."""

    config: Config

    @property
    def needs(self) -> Needs:
        """And the critic's values."""
        return super().needs | Needs.VALUES

    def critic_loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Half the squared error of the values, or of the values held near the old ones where that is larger."""
        batch, clip = inputs.batch, self.config.value_clip
        packed = Packed.of(batch)
        values_T = packed.trained(given(inputs.values, "values"))
        returns_T = packed.trained(given(batch.returns, "returns"))
        errors_T = (values_T - returns_T) ** 2
        metrics = {"critic/value_mean": packed.mean(values_T), "critic/error_square_mean": packed.mean(errors_T)}
        if clip is not None:
            old_T = packed.trained(given(batch.values, "values"))
            near_T = torch.clamp(values_T, old_T - clip, old_T + clip)
            held_errors_T = (near_T - returns_T) ** 2
            metrics["critic/clipped_ratio"] = packed.mean((held_errors_T > errors_T).to(errors_T.dtype))
            errors_T = torch.maximum(errors_T, held_errors_T)
        return packed.share_of_loss(0.5 * errors_T, inputs.counts, self.config.aggregation), metrics

    def _credit(self, rewards_T: Tensor, batch: TrainBatch, packed: Packed) -> TrainBatch:
        values_T = given(batch.values, "values")
        advantages_T, returns_T = gae(rewards_T, values_T, packed, self.config.gamma, self.config.lam)
        if self.config.whiten:
            advantages_T = packed.trained(standardize(advantages_T, packed.loss_mask, eps=1e-8))
        return replace(batch, advantages=advantages_T.float(), returns=returns_T.float())

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, tokens.packed, self.config)
