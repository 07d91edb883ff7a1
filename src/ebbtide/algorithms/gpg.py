"""GPG: the plain policy gradient, its advantages scaled up for the groups that teach nothing."""

from typing import ClassVar

from torch import Tensor

from ebbtide.algorithms.judgement import group_deviation, group_std
from ebbtide.algorithms.policy_gradient import Metrics, PolicyGradient, Tokens

__all__ = ["GPG"]


class GPG(PolicyGradient):
    """Group Policy Gradient.

    Source: arXiv:2504.02546, the GPG objective: rewards less their group's mean, without a standard deviation, times
    completions / completions whose group's rewards differ. Here groups without contrast stay in the batch, where they
    add nothing.
    """

    class Config(PolicyGradient.Config):
        """Settings of GPG."""

        min_group_size: ClassVar[int] = 2

        type: str = "gpg"

    config: Config

    def _judge(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        has_contrast_B = group_std(rewards_B, group_ids_B) > 0
        scale = len(rewards_B) / has_contrast_B.sum().clamp(min=1)
        return scale * group_deviation(rewards_B, group_ids_B)

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantages * tokens.logprobs, {}
