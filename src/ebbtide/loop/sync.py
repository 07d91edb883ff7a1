"""The synchronous loop: policy and rollout share the devices, and every batch comes from the present weights.

generate all -> score -> judge and pack -> log-probs -> update -> push
"""

from dataclasses import dataclass
from typing import cast

from ebbtide.algorithms.base import CriticAlgorithm
from ebbtide.loop.consistency import check_agreement
from ebbtide.loop.parts import Parts
from ebbtide.loop.step import (
    Harvest,
    add_logprobs,
    batch_metrics,
    generate,
    make_batch,
    update,
    update_critic,
)
from ebbtide.rewards.scoring import score
from ebbtide.types import Group
from ebbtide.weightsync.push import push

__all__ = ["StepReport", "train_step"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Attributes:
        metrics: under the keys of `ebbtide.observe.metrics`; the phases' times and memory are the ledger's.
        groups: that were scored, those that the algorithm left out included.
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
    harvest = await _harvest(parts)
    metrics, is_skipped = harvest.metrics(parts.recipe.eval.correct_at), False
    if harvest.kept:
        with phase("batch"):
            batch = make_batch(harvest.kept, algorithm)
        if version == 0:
            with phase("consistency"):
                metrics |= check_agreement(batch, engine, parts.rollout.state, parts.recipe).metrics()
        with phase("logprobs"):
            batch, prepared = add_logprobs(batch, algorithm, engine, parts.reference, parts.critic)
        metrics |= batch_metrics(batch, version)
        with phase("update"):
            stats = update(engine, batch, algorithm)
        if parts.critic is not None:
            with phase("critic"):
                metrics |= update_critic(parts.critic, batch, cast(CriticAlgorithm, algorithm))
        metrics |= {name: ratio.value for name, ratio in prepared.items() if ratio.value is not None}
        metrics |= stats.metrics()
        is_skipped = stats.optim.is_skipped
    with phase("push"):
        await push(engine.named_weights(), parts.transport, parts.rollout, version + 1)
    return StepReport(metrics, tuple(harvest.scored), is_skipped, tuple(harvest.messages))


async def _harvest(parts: Parts) -> Harvest:
    """Scored groups until enough of them are kept, or the algorithm's refills are used up."""
    batch, harvest = parts.recipe.batch, Harvest()
    for _ in range(1 + parts.algorithm.max_refills):
        with parts.ledger.phase("generate"):
            prompts = parts.data.prompts.next(parts.sampler, batch.prompts - len(harvest.kept))
            groups = await generate(parts.rollout, prompts, batch.group_size, parts.sampling, parts.counter)
        with parts.ledger.phase("score"):
            harvest.add(score(groups, parts.rewards, parts.data.decode), parts.algorithm)
        if len(harvest.kept) == batch.prompts or harvest.num_failed:
            break
    return harvest
