"""The gate: silent for an honest rollout, and each way of being wrong is stopped with its cause named."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ebbtide.errors import ConsistencyError
from ebbtide.loop.consistency import check_agreement, compare
from ebbtide.loop.parts import Parts
from ebbtide.loop.step import generate, make_batch
from ebbtide.loop.sync import train_step
from ebbtide.types import SamplingParams, TrainBatch
from tests.loop.running import function_reward, recipe, with_parts


def test_an_honest_rollout_agrees() -> None:
    async def work(parts: Parts) -> dict[str, float]:
        return (await train_step(parts, 0)).metrics

    metrics = with_parts(recipe(rewards=function_reward("distinct"), **{"sampling.temperature": 0.7}), work)
    assert metrics["consistency/max_abs_nats"] < 1e-5


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"sampling.top_p": 0.5}, r"sampling\.top_p=0\.5 cuts the distribution"),
        ({"sampling.top_k": 3}, r"sampling\.top_k=3 cuts the distribution"),
        ({"sampling.min_p": 0.9}, r"sampling\.min_p=0\.9 cuts the distribution"),
    ],
)
def test_a_cut_distribution_is_stopped(changes: dict[str, Any], cause: str) -> None:
    async def work(parts: Parts) -> None:
        await train_step(parts, 0)

    with pytest.raises(ConsistencyError, match=cause):
        with_parts(recipe(rewards=function_reward("distinct"), **changes), work)


def test_another_temperature_is_stopped() -> None:
    async def work(parts: Parts) -> None:
        batch = await _batch(parts, replace(parts.sampling, temperature=0.5))
        check_agreement(batch, parts.engine, parts.rollout.state, parts.recipe)

    with pytest.raises(ConsistencyError, match=r"temperature: the rollout's log-probs vary"):
        with_parts(recipe(**{"model.architecture.hidden_size": 64}), work)


def test_other_weights_are_stopped() -> None:
    async def work(parts: Parts) -> None:
        batch = await _batch(parts, parts.sampling)
        with torch.no_grad():
            for _, weight in parts.engine.named_weights():
                weight.mul_(1.5)
        check_agreement(batch, parts.engine, parts.rollout.state, parts.recipe)

    with pytest.raises(ConsistencyError, match="weights: the rollout holds others"):
        with_parts(recipe(), work)


def test_tokens_of_another_version_are_named() -> None:
    async def work(parts: Parts) -> None:
        batch = await _batch(parts, parts.sampling)
        stale = replace(batch, token_versions=batch.token_versions - 1, rollout_logprobs=batch.rollout_logprobs - 1)
        check_agreement(stale, parts.engine, parts.rollout.state, parts.recipe)

    with pytest.raises(ConsistencyError, match=r"tokens come from versions \[-1\]"):
        with_parts(recipe(), work)


def test_the_bound_is_the_recipes() -> None:
    async def work(parts: Parts) -> float:
        return (await train_step(parts, 0)).metrics["consistency/mean_abs_nats"]

    loose = {"sampling.top_k": 3, "consistency.max_mean_abs_diff": 10.0}
    assert with_parts(recipe(rewards=function_reward("distinct"), **loose), work) > 1e-4


def test_compare_looks_at_trained_tokens_alone() -> None:
    agreement = compare(
        torch.tensor([0.0, -1.0, 9.0]), torch.tensor([0.0, -1.5, 0.0]), torch.tensor([True, True, False])
    )
    assert agreement.mean_abs_nats == pytest.approx(0.25)
    assert agreement.max_abs_nats == pytest.approx(0.5)


async def _batch(parts: Parts, sampling: SamplingParams) -> TrainBatch:
    prompts = parts.data.prompts.next(parts.sampler)
    groups = await generate(parts.rollout, prompts, 4, sampling, parts.counter)
    return make_batch([replace(group, rewards=torch.arange(4.0)) for group in groups], parts.algorithm)
