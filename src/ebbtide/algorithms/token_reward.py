"""Base of the algorithms that reward tokens: the outcome on the last one, less what each pays in KL."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ebbtide.algorithms.base import Needs
from ebbtide.algorithms.credit import outcome_rewards
from ebbtide.algorithms.penalty import RewardKL, RewardPenalty, estimate
from ebbtide.algorithms.policy_gradient import Metrics, PolicyGradient, given
from ebbtide.algorithms.reduction import Packed
from ebbtide.types import BatchCounts, Ratio, TrainBatch

__all__ = ["TokenReward"]


class TokenReward(PolicyGradient):
    """Says how rewards of tokens become advantages in `_credit`."""

    class Config(PolicyGradient.Config):
        """What all of them can be told."""

        reward_kl: RewardKL = RewardKL()
        """KL to the reference policy in the reward."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.penalty = RewardPenalty(config.reward_kl)

    @property
    def needs(self) -> Needs:
        """And the reference's log-probs where the reward has a cost."""
        return super().needs | (Needs.REF_LOGPROBS if self.config.reward_kl.coef else Needs.NOTHING)

    def prepare(self, batch: TrainBatch, counts: BatchCounts) -> tuple[TrainBatch, Metrics]:
        """Advantages from rewards of tokens, then weighed by the rollout correction."""
        packed = Packed.of(batch)
        metrics: Metrics = {}
        rewards_T = outcome_rewards(batch.rewards, packed)
        if self.config.reward_kl.coef:
            log_ratio_T = self._old_logprobs(batch) - given(batch.ref_logprobs, "ref_logprobs")
            log_ratio_T = packed.trained(log_ratio_T)
            rewards_T = rewards_T - self.penalty.costs(log_ratio_T)
            metrics = self._measure(log_ratio_T, packed, counts)
        batch, diagnostics = super().prepare(self._credit(rewards_T, batch, packed), counts)
        return batch, metrics | diagnostics

    def state(self) -> dict[str, Any]:
        """The coefficient of the KL cost, where it adapts."""
        return self.penalty.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from it."""
        self.penalty.load_state(state)

    def _measure(self, log_ratio_T: Tensor, packed: Packed, counts: BatchCounts) -> Metrics:
        """Steer the penalty by this step's KL, and report both."""
        coef = self.penalty.coef
        kl = packed.mean(estimate(log_ratio_T, self.config.reward_kl.estimator))
        self.penalty.steer(kl.value or 0.0, counts.num_sequences)
        return {
            "policy/old_ref_kl_nats": kl,
            "policy/reward_kl_coef": Ratio(torch.tensor(coef), torch.tensor(1.0)),
        }

    @abstractmethod
    def _credit(self, rewards_T: Tensor, batch: TrainBatch, packed: Packed) -> TrainBatch:
        """The batch with advantages, from [T] float64 rewards that are 0 where not trained."""
