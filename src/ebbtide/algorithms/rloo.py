"""RLOO: plain REINFORCE on whole completions, each against the mean reward of the others of its prompt."""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from ebbtide.algorithms.judgement import group_mean_of_others
from ebbtide.algorithms.policy_gradient import Metrics, Tokens
from ebbtide.algorithms.reduction import Aggregation, Packed
from ebbtide.algorithms.token_reward import TokenReward
from ebbtide.types import TrainBatch

__all__ = ["RLOO"]


class RLOO(TokenReward):
    """REINFORCE Leave-One-Out.

    Source: arXiv:2402.14740, the leave-one-out estimator; its reward includes the KL of the whole completion to the
    reference. Here that KL is off until `reward_kl.coef` is set.
    """

    class Config(TokenReward.Config):
        """Settings of RLOO."""

        min_group_size: ClassVar[int] = 2

        type: str = "rloo"
        aggregation: Aggregation = "sequence_sum"
        """How tokens add up; sequence_sum is the log-prob of the whole completion, as in the paper."""

    config: Config

    def _credit(self, rewards_T: Tensor, batch: TrainBatch, packed: Packed) -> TrainBatch:
        rewards_B, group_ids_B = packed.per_sequence(rewards_T), batch.group_ids.long()
        advantages_B = rewards_B - group_mean_of_others(rewards_B, group_ids_B)
        return replace(batch, advantages=packed.trained(advantages_B.float()[packed.sequence_ids]))

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantages * tokens.logprobs, {}
