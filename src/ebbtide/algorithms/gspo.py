"""GSPO: GRPO whose ratio, and whose clip, belong to the whole completion."""

from pydantic import Field
from torch import Tensor

from ebbtide.algorithms.grpo import GRPO
from ebbtide.algorithms.policy_gradient import Metrics, Tokens
from ebbtide.algorithms.reduction import Aggregation
from ebbtide.algorithms.surrogate import clipped_surrogate

__all__ = ["GSPO"]


class GSPO(GRPO):
    """Group Sequence Policy Optimization.

    Source: arXiv:2507.18071, eq. 5 and 7: the ratio is the geometric mean of the tokens' ratios. Here each token
    carries it (the paper's GSPO-token, eq. 13), which has the same gradient and allows advantages of tokens.
    """

    class Config(GRPO.Config):
        """Settings of GSPO."""

        type: str = "gspo"
        aggregation: Aggregation = "sequence_mean"
        """As in GRPO; sequence_mean is the paper's."""
        clip_low: float = Field(3e-4, gt=0, le=1)
        """As in GRPO; a mean over tokens moves far less than a token."""
        clip_high: float = Field(4e-4, gt=0)
        """As in GRPO, likewise."""

    config: Config

    def _objective(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        mean_B = tokens.packed.mean_per_sequence(tokens.log_ratio.detach())
        own_slope_T = tokens.logprobs - tokens.logprobs.detach()
        ratio_T = (mean_B[tokens.packed.sequence_ids] + own_slope_T).exp()
        return clipped_surrogate(ratio_T, tokens.advantages, tokens.packed, self.config)
