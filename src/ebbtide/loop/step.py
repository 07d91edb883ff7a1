"""What the loops are made of, in the order in which a step calls it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ebbtide.algorithms.base import Algorithm, CriticAlgorithm, LossInputs, Needs, check_batch
from ebbtide.engines.base import Loss, MicrobatchOutput, OptimStats, TrainEngine
from ebbtide.errors import DataError, problem
from ebbtide.loop.reference import ScoresReference
from ebbtide.rewards.scoring import ScoredGroups
from ebbtide.rollout.base import RolloutBackend
from ebbtide.types import Completion, GenerateRequest, Group, Prompt, Ratio, SamplingParams, StopReason, TrainBatch

__all__ = [
    "CriticLoss",
    "Harvest",
    "RequestCounter",
    "UpdateStats",
    "add_logprobs",
    "batch_metrics",
    "generate",
    "group_metrics",
    "make_batch",
    "update",
    "update_critic",
]


@dataclass(slots=True)
class RequestCounter:
    """Numbers requests through the whole run, so that every draw has random numbers of its own.

    Attributes:
        seed: of the run.
        next_id: of the next request; a resumed run goes on with it.
    """

    seed: int
    next_id: int = 0

    def request(self, prompt: Prompt, sampling: SamplingParams) -> GenerateRequest:
        """The next request."""
        request_id, self.next_id = self.next_id, self.next_id + 1
        mixed = (self.seed * 0x9E3779B97F4A7C15 + request_id) & ((1 << 63) - 1)
        return GenerateRequest(request_id, prompt.token_ids, sampling, mixed)


async def generate(
    rollout: RolloutBackend,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: SamplingParams,
    counter: RequestCounter,
) -> list[Group]:
    """`group_size` completions of each prompt, in the order of the prompts."""
    requests = [counter.request(prompt, sampling) for prompt in prompts for _ in range(group_size)]
    found: dict[int, Completion] = {}
    async for completion in rollout.generate(requests):
        found[completion.request_id] = completion
    ordered = [found[request.request_id] for request in requests]
    return [Group(prompt, tuple(ordered[g * group_size : (g + 1) * group_size])) for g, prompt in enumerate(prompts)]


def make_batch(groups: Sequence[Group], algorithm: Algorithm) -> TrainBatch:
    """Judge the groups and pack their completions; those without a token are left out.

    Raises:
        DataError: nothing is left to train on.
    """
    advantages = algorithm.advantages(groups)
    sequences, versions, spread, group_ids, rewards = [], [], [], [], []
    for g, group in enumerate(groups):
        assert group.rewards is not None, group.prompt.index
        scores = group.rewards.tolist()
        for c, completion in enumerate(group.completions):
            if completion.token_ids.shape[0] == 0:
                continue
            sequences.append((group.prompt.token_ids, completion.token_ids, completion.logprobs))
            versions.append(completion.versions)
            spread.append(advantages[g][c])
            group_ids.append(g)
            rewards.append(scores[c])
    if not sequences:
        rule = "no completion with a token is left to train on"
        raise DataError(
            problem("batch", len(groups), rule, "Are all groups skipped or filtered, or all answers empty?")
        )
    return TrainBatch.pack(sequences, versions=versions, advantages=spread, group_ids=group_ids, rewards=rewards)


def add_logprobs(
    batch: TrainBatch,
    algorithm: Algorithm,
    engine: TrainEngine,
    reference: ScoresReference | None,
    critic: TrainEngine | None,
) -> tuple[TrainBatch, Mapping[str, Ratio]]:
    """The log-probs and values that the loss uses, and no others; then what the algorithm makes of the whole batch."""
    if Needs.OLD_LOGPROBS in algorithm.needs:
        batch = replace(batch, old_logprobs=engine.logprobs(batch))
    if Needs.REF_LOGPROBS in algorithm.needs:
        assert reference is not None, algorithm.needs
        batch = replace(batch, ref_logprobs=reference.logprobs(batch))
    if Needs.VALUES in algorithm.needs:
        assert critic is not None, algorithm.needs
        batch = replace(batch, values=critic.logprobs(batch))
    check_batch(batch)
    return algorithm.prepare(batch, batch.counts(engine.setting.max_completion_tokens))


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """One optimizer step.

    Attributes:
        outputs: of the microbatches.
        optim: of the step.
    """

    outputs: list[MicrobatchOutput]
    optim: OptimStats

    def metrics(self) -> dict[str, float]:
        """Loss, the algorithm's figures and the optimizer's."""
        found: dict[str, Ratio] = {}
        for output in self.outputs:
            for name, ratio in output.metrics.items():
                found[name] = found[name] + ratio if name in found else ratio
        values = {name: ratio.value for name, ratio in found.items()}
        return {
            "loss/total": sum(float(output.loss) for output in self.outputs),
            **{name: value for name, value in values.items() if value is not None},
            "optim/grad_norm": self.optim.grad_norm,
            "optim/lr": self.optim.lr,
            "optim/num_microbatches": float(len(self.outputs)),
        }


def update(engine: TrainEngine, batch: TrainBatch, loss: Loss) -> UpdateStats:
    """Microbatches -> forward_backward -> optim_step."""
    outputs = engine.forward_backward(batch, loss)
    return UpdateStats(outputs, engine.optim_step())


@dataclass(frozen=True, slots=True)
class CriticLoss:
    """What a critic's engine minimises."""

    algorithm: CriticAlgorithm
    needs: Needs = Needs.NOTHING

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
        """See `CriticAlgorithm.critic_loss`."""
        return self.algorithm.critic_loss(inputs)


def update_critic(critic: TrainEngine, batch: TrainBatch, algorithm: CriticAlgorithm) -> dict[str, float]:
    """One step of the critic towards the batch's returns; its metrics."""
    metrics = update(critic, batch, CriticLoss(algorithm)).metrics()
    own = {key: value for key, value in metrics.items() if key.startswith("critic/")}
    return own | {"critic/loss": metrics["loss/total"], "critic/grad_norm": metrics["optim/grad_norm"]}


@dataclass(slots=True)
class Harvest:
    """The scored groups of a step.

    Attributes:
        scored: all of them.
        kept: those that the algorithm trains on.
        num_failed: groups that a reward could not score.
        messages: why.
    """

    scored: list[Group] = field(default_factory=list)
    kept: list[Group] = field(default_factory=list)
    num_failed: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, found: ScoredGroups, algorithm: Algorithm) -> None:
        """One round of generation."""
        self.scored += found.groups
        self.kept += [group for group in found.groups if algorithm.keep(group)]
        self.num_failed += found.num_skipped
        self.messages += found.messages

    def metrics(self, correct_at: float) -> dict[str, float]:
        """What the step's completions earned, and their lengths."""
        counts = {
            "group/num_kept": float(len(self.kept)),
            "group/num_dropped": float(len(self.scored) - len(self.kept)),
            "reward/num_failed": float(self.num_failed),
        }
        return counts | group_metrics(self.scored, correct_at)


def group_metrics(groups: Sequence[Group], correct_at: float) -> dict[str, float]:
    """What the step's completions earned, and their lengths."""
    if not groups:
        return {}
    rewards_RG = torch.stack([group.rewards for group in groups if group.rewards is not None])
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([completion.token_ids.shape[0] for completion in completions], dtype=torch.float32)
    prompts = torch.tensor([group.prompt.token_ids.shape[0] for group in groups], dtype=torch.float32)
    truncated = sum(completion.stop_reason is StopReason.LENGTH for completion in completions)
    metrics: dict[str, float | Tensor] = {
        "reward/mean": rewards_RG.mean(),
        "reward/std": rewards_RG.std(correction=0),
        "reward/min": rewards_RG.min(),
        "reward/max": rewards_RG.max(),
        "reward/accuracy": (rewards_RG >= correct_at).float().mean(),
        "reward/group_std": rewards_RG.std(dim=1, correction=0).mean(),
        "group/uniform_ratio": (rewards_RG == rewards_RG[:, :1]).all(1).float().mean(),
        "completion/mean_tokens": lengths.mean(),
        "completion/min_tokens": lengths.min(),
        "completion/max_tokens": lengths.max(),
        "completion/truncated_ratio": truncated / len(completions),
        "prompt/mean_tokens": prompts.mean(),
        "prompt/max_tokens": prompts.max(),
    }
    for name in groups[0].reward_parts:
        part = torch.cat([group.reward_parts[name] for group in groups])
        metrics[f"reward/{name}_mean"] = part.mean()
        metrics[f"reward/{name}_std"] = part.std(correction=0)
    return {name: float(value) for name, value in metrics.items()}


def batch_metrics(batch: TrainBatch, version: int) -> dict[str, float]:
    """Advantages and staleness over the trained tokens; `version` is the policy's before the update."""
    advantages_N = batch.advantages[batch.loss_mask]
    staleness_N = version - batch.token_versions[batch.loss_mask]
    return {
        "advantage/mean": float(advantages_N.mean()),
        "advantage/std": float(advantages_N.std(correction=0)),
        "advantage/min": float(advantages_N.min()),
        "advantage/max": float(advantages_N.max()),
        "advantage/abs_mean": float(advantages_N.abs().mean()),
        "staleness/mean": float(staleness_N.float().mean()),
        "staleness/max": float(staleness_N.max()),
    }
