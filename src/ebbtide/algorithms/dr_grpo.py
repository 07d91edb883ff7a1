"""Dr. GRPO: GRPO without the two divisions that favour easy prompts and long wrong completions."""

from typing import Literal

from ebbtide.algorithms.grpo import GRPO
from ebbtide.algorithms.reduction import Aggregation

__all__ = ["DrGRPO"]


class DrGRPO(GRPO):
    """GRPO Done Right.

    Source: arXiv:2503.20783, section 3.2: no division by the group's standard deviation, and a constant in
    place of a completion's length. Here that constant is sampling.max_tokens, as in the authors' code.
    """

    class Config(GRPO.Config):
        """Settings of Dr. GRPO."""

        type: str = "dr_grpo"
        aggregation: Aggregation = "constant"
        """As in GRPO; constant is what removes the bias towards long wrong completions."""
        scale: Literal["group", "batch", "none"] = "none"
        """As in GRPO; none is what removes the bias towards prompts that are nearly always solved or never."""

    config: Config
