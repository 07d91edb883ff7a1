"""The contract of a reward: completions in, one finite score each out.

`scoring.py` runs rewards under their time limits and checks what they return; a reward itself only judges. It is made
in the main process as `Reward(config)`, so that mistakes show at the start, and called in a process of its own, which
lives as long as the run: what a reward keeps between calls stays there, and nothing it does can hang the run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field

from ebbtide.config import Component
from ebbtide.types import StopReason

__all__ = ["Reward", "RewardConfig", "RewardInput", "each_answer_once"]


class RewardConfig(Component):
    """Base of every reward's `Config`."""

    weight: float = 1.0
    """Factor in the training reward, which is the weighted sum; 0 only reports the score."""
    name: str | None = None
    """What metrics call it; None means its type, or the function's name."""
    time_limit_s: float = Field(60.0, gt=0)
    """Seconds that scoring one step's completions may take."""
    on_error: Literal["stop", "skip_group"] = "stop"
    """What a reward that raises, hangs or returns nonsense does to the run."""

    @property
    def label(self) -> str:
        """What metrics and errors call the reward."""
        return self.name or self.type.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One completion as a reward sees it.

    Attributes:
        prompt: the row's `prompt`: text, or chat messages.
        text: the completion, decoded without special tokens.
        row: all columns of the row.
        num_tokens: C, the stop token included.
        stop_reason: why it ended.
    """

    prompt: Any
    text: str
    row: Mapping[str, Any]
    num_tokens: int
    stop_reason: StopReason


class Reward(Protocol):
    """Judges completions; the completions of one group stand together."""

    def __call__(self, completions: Sequence[RewardInput]) -> Sequence[float]:
        """One finite score a completion, in order."""
        ...


def each_answer_once(completions: Sequence[RewardInput], judge: Callable[[RewardInput], float]) -> list[float]:
    """`judge` of each, called once for equal texts of one row: the completions of a group are often alike.

    For rewards that look at text and row alone.
    """
    known: dict[tuple[int, str], float] = {}
    scores = []
    for completion in completions:
        key = (id(completion.row), completion.text)  # all rows are alive through this call
        if key not in known:
            known[key] = judge(completion)
        scores.append(known[key])
    return scores
