"""The synchronous loop: policy and rollout share the devices, and every batch comes from the present weights.

generate all -> score -> judge and pack -> log-probs -> update -> push
"""

from dataclasses import dataclass

from ebbtide.loop.consistency import check_agreement
from ebbtide.loop.parts import Parts
from ebbtide.loop.step import add_logprobs, batch_metrics, generate, group_metrics, make_batch, update
from ebbtide.rewards.scoring import ScoredGroups, score
from ebbtide.types import Group
from ebbtide.weightsync.push import push

__all__ = ["StepReport", "train_step"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Attributes:
        metrics: under the keys of `ebbtide.observe.metrics`, phases' times and memory not yet among them.
        groups: that were trained on.
        is_skipped: loss or gradient was not finite, and the weights are as before.
        messages: failures of rewards that did not stop the run.
    """

    metrics: dict[str, float]
    groups: tuple[Group, ...]
    is_skipped: bool
    messages: tuple[str, ...]


async def train_step(parts: Parts, version: int) -> StepReport:
    """One step: from the weights of `version`, which the rollout has, to those of `version + 1`."""
    phase, algorithm, engine = parts.ledger.phase, parts.algorithm, parts.engine
    scored = await _scored_groups(parts)
    with phase("batch"):
        batch = make_batch(scored.groups, algorithm)
    metrics = group_metrics(scored.groups, parts.recipe.eval.correct_at) | batch_metrics(batch, version)
    if version == 0:
        with phase("consistency"):
            metrics |= check_agreement(batch, engine, parts.rollout.state, parts.recipe).metrics()
    with phase("logprobs"):
        batch, prepared = add_logprobs(batch, algorithm, engine, parts.reference)
    with phase("update"):
        stats = update(engine, batch, algorithm)
    with phase("push"):
        await push(engine.named_weights(), parts.transport, parts.rollout, version + 1)
    metrics |= {name: ratio.value for name, ratio in prepared.items() if ratio.value is not None}
    metrics |= stats.metrics()
    metrics |= {"group/num_kept": float(len(scored.groups)), "reward/num_failed": float(scored.num_skipped)}
    return StepReport(metrics, scored.groups, stats.optim.is_skipped, scored.messages)


async def _scored_groups(parts: Parts) -> ScoredGroups:
    with parts.ledger.phase("generate"):
        prompts = parts.data.prompts.next(parts.sampler)
        size = parts.recipe.batch.group_size
        groups = await generate(parts.rollout, prompts, size, parts.sampling, parts.counter)
    with parts.ledger.phase("score"):
        return score(groups, parts.rewards, parts.data.decode)
