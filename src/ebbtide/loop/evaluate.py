"""Accuracy on held-out prompts, with its uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.loop.step import RequestCounter, generate
from ebbtide.observe.interval import wilson_interval
from ebbtide.rewards.scoring import Decode, Rewards, score
from ebbtide.rollout.base import RolloutBackend
from ebbtide.types import Group, Prompt, SamplingParams, StopReason

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Answers to held-out prompts, one each.

    Attributes:
        num_prompts: prompts that every reward could score.
        num_correct: of them.
        reward_mean: of the training reward.
        mean_tokens: of the completions.
        truncated_ratio: share of completions that ended at their token limit.
        groups: the prompts with their completions and rewards.
    """

    num_prompts: int
    num_correct: int
    reward_mean: float
    mean_tokens: float
    truncated_ratio: float
    groups: tuple[Group, ...]

    @property
    def accuracy(self) -> float:
        """Share of correct answers."""
        return self.num_correct / max(1, self.num_prompts)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        return wilson_interval(self.num_correct, self.num_prompts)

    def metrics(self) -> dict[str, float]:
        """Under their keys."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward_mean": self.reward_mean,
            "eval/completion_mean_tokens": self.mean_tokens,
            "eval/truncated_ratio": self.truncated_ratio,
            "eval/num_prompts": float(self.num_prompts),
        }


async def evaluate(
    rollout: RolloutBackend,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    rewards: Rewards,
    decode: Decode,
    *,
    correct_at: float,
    seed: int,
) -> Evaluation:
    """Answer each prompt once and judge the answers; the same seed draws the same random numbers every time."""
    groups = await generate(rollout, prompts, 1, sampling, RequestCounter(seed))
    scored = score(groups, rewards, decode).groups
    totals = [float(group.rewards[0]) for group in scored if group.rewards is not None]
    completions = [group.completions[0] for group in scored]
    count = max(1, len(scored))
    return Evaluation(
        num_prompts=len(scored),
        num_correct=sum(total >= correct_at for total in totals),
        reward_mean=sum(totals) / count,
        mean_tokens=sum(item.token_ids.shape[0] for item in completions) / count,
        truncated_ratio=sum(item.stop_reason is StopReason.LENGTH for item in completions) / count,
        groups=scored,
    )
