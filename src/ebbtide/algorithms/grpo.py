"""GRPO: a completion is judged against the others of its prompt, and a clipped ratio limits how far it moves."""

from torch import Tensor

from ebbtide.algorithms.group_relative import GroupRelative
from ebbtide.algorithms.policy_gradient import Metrics, Tokens
from ebbtide.algorithms.surrogate import ClippedConfig, clipped_surrogate

__all__ = ["GRPO"]


class GRPO(GroupRelative):
    """Group Relative Policy Optimization.

    Source: DeepSeekMath, arXiv:2402.03300, eq. 3 (objective) and section 4.1.2 (advantages). Here tokens weigh the
    same by default, as in DAPO, where the paper weighs sequences the same (aggregation = "sequence_mean"); the KL term
    is off by default; and the standard deviation is over G - 1.
    """

    class Config(GroupRelative.Config, ClippedConfig):
        """Settings of GRPO."""

        type: str = "grpo"

    config: Config

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, tokens.packed, self.config)
