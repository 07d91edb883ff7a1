"""What is this backend's own; the rest is the contract's (tests/contracts/test_rollout.py)."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.config import load
from ebbtide.device import Device
from ebbtide.errors import ConfigError, RolloutError, WeightSyncError
from ebbtide.models.policy import Policy
from ebbtide.recipe import Recipe
from ebbtide.rollout.base import Asleep, Awake, Loading, RolloutSetting
from ebbtide.rollout.inprocess import InProcessRollout
from ebbtide.types import TrainBatch
from ebbtide.weightsync.base import Load, NamedTensor
from ebbtide.weightsync.inprocess import InProcessTransport
from ebbtide.weightsync.push import push
from tests.contracts.rollouts import answers, model_of, opened, request, setting, weights
from tests.models.zoo import make


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


class Lender:
    """Hands over views of one buffer, which it fills again, as a transport between processes does."""

    async def receive(self, load: Load, version: int) -> None:
        buffer = torch.empty(100_000)
        for name, weight in weights(version):
            view = buffer[: weight.numel()].view_as(weight)
            view.copy_(weight)
            load([(name, view)])
        buffer.fill_(float("nan"))

    async def close(self) -> None:
        pass


def test_weights_are_shared_with_an_engine_in_this_process() -> None:
    async def test() -> None:
        async with opened("inprocess") as harness:
            assert isinstance(harness.rollout, InProcessRollout)
            mine = dict(harness.rollout._weights.model.named_parameters())
            assert all(mine[name].data_ptr() == item.data_ptr() for name, item in weights(0))
        async with opened("inprocess", share_weights=False) as harness:
            assert isinstance(harness.rollout, InProcessRollout)
            mine = dict(harness.rollout._weights.model.named_parameters())
            assert not any(mine[name].data_ptr() == item.data_ptr() for name, item in weights(0))

    run(test())


def test_views_of_a_buffer_are_copied_though_sharing_is_on() -> None:
    async def test() -> None:
        async with opened("inprocess") as shared:
            expected = await answers(shared.rollout, [request(i, [3, 4]) for i in range(4)])
        async with opened("inprocess", version=None) as harness:
            await harness.rollout.receive_weights(0, Lender())
            found = await answers(harness.rollout, [request(i, [3, 4]) for i in range(4)])
            assert all(torch.equal(found[i].logprobs, expected[i].logprobs) for i in range(4))

    run(test())


@pytest.mark.parametrize("share_weights", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_logits_are_bit_equal_after_sleep_and_a_push(level: Any, share_weights: bool) -> None:
    async def test() -> None:
        async with opened("inprocess", share_weights=share_weights) as harness:
            assert isinstance(harness.rollout, InProcessRollout)
            before = await answers(harness.rollout, [request(i, [3, 4], max_tokens=20) for i in range(6)])
            buffers = {name: item.clone() for name, item in harness.rollout._weights.model.named_buffers()}
            assert any("inv_freq" in name for name in buffers)
            for _ in range(2):
                await harness.rollout.sleep(level)
                await harness.rollout.wake()
                await harness.push(0)
            for name, item in harness.rollout._weights.model.named_buffers():
                assert torch.equal(item, buffers[name])
            after = await answers(harness.rollout, [request(i, [3, 4], max_tokens=20) for i in range(6)])
            assert all(torch.equal(after[i].logprobs, before[i].logprobs) for i in range(6))

    run(test())


def test_level_two_lets_the_weights_go() -> None:
    async def test() -> None:
        async with opened("inprocess", share_weights=False) as harness:
            assert isinstance(harness.rollout, InProcessRollout)
            await harness.rollout.sleep(2)
            assert harness.state() == Asleep(2)
            assert {item.device.type for item in harness.rollout._weights.model.parameters()} == {"meta"}
        assert weights(0)[0][1].device.type == "cpu", "closing leaves the engine's own"

    run(test())


def test_a_push_that_lacks_weights_leaves_loading() -> None:
    async def test() -> None:
        async with opened("inprocess") as harness:
            with pytest.raises(WeightSyncError, match="the push of version 1 lacked"):
                await harness.push(1, weights(1)[:-1])
            assert harness.state() == Loading(1)
            with pytest.raises(WeightSyncError, match="no such weight"):
                await harness.push(2, [*weights(1), ("model.extra", torch.zeros(1))])
            assert harness.state() == Loading(2)
            await harness.push(3)
            assert harness.state() == Awake(3)

    run(test())


def test_two_pushes_at_once_end_in_the_first() -> None:
    async def test() -> None:
        async with opened("inprocess") as harness:
            outcomes = await asyncio.gather(
                push(weights(1), harness.transport, harness.rollout, 1),
                push(weights(2), InProcessTransport(deadline_s=1), harness.rollout, 2),
                return_exceptions=True,
            )
            assert isinstance(outcomes[1], RolloutError)
            assert harness.state() == Awake(1)

    run(test())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engines_policy_and_the_rollout_agree(dtype: torch.dtype) -> None:
    """The gate of a run: the same weights, the same tokens, float32 to 1e-5 and bfloat16 to its rounding."""

    async def test() -> None:
        engine = make("qwen3", max_position_embeddings=64, tie_word_embeddings=True).to(dtype)
        rollout = InProcessRollout(InProcessRollout.Config(), RolloutSetting(engine.config, dtype, Device("cpu"), (2,)))
        await push(engine.named_parameters(), InProcessTransport(), rollout, 0)
        requests = [request(i, [3, 4, 5], max_tokens=20, temperature=0.7) for i in range(16)]
        found = await answers(rollout, requests)
        rows = [(requests[0].prompt_ids, found[i].token_ids, found[i].logprobs) for i in range(16)]
        batch = TrainBatch.pack(rows, group_ids=[0] * 16)
        policy = Policy(engine)
        with torch.no_grad():
            stats: Any = policy(policy.layout(batch), temperature=0.7)
        apart = (batch.rollout_logprobs[batch.loss_mask] - stats.logprobs).abs()
        assert float(apart.max()) < 1e-5 if dtype == torch.float32 else float(apart.mean()) < 5e-2
        await rollout.close()

    run(test())


def test_a_bfloat16_rollout_of_a_float32_engine_copies() -> None:
    async def test() -> None:
        bf16 = RolloutSetting(setting().model_config, torch.bfloat16, Device("cpu"), (1,))
        rollout = InProcessRollout(InProcessRollout.Config(), bf16)
        await push(weights(0), InProcessTransport(), rollout, 0)
        assert {item.dtype for item in rollout._weights.model.parameters()} == {torch.bfloat16}
        await answers(rollout, [request(0, [3])])
        assert {item.dtype for item in model_of(0).parameters()} == {torch.float32}
        await rollout.close()

    run(test())


def test_stop_strings_need_a_tokenizer() -> None:
    async def test() -> None:
        config = RolloutSetting(setting().model_config, torch.float32, Device("cpu"), (1,))
        rollout = InProcessRollout(InProcessRollout.Config(), config)
        await push(weights(0), InProcessTransport(), rollout, 0)
        with pytest.raises(RolloutError, match="stop strings need a tokenizer"):
            await answers(rollout, [request(0, [3], stop=("1",))])
        await rollout.close()

    run(test())


def test_weights_that_are_not_finite_end_the_call_and_not_the_backend() -> None:
    async def test() -> None:
        async with opened("inprocess") as harness:
            bad: Sequence[NamedTensor] = [(name, torch.full_like(item, torch.nan)) for name, item in weights(0)]
            await harness.push(1, bad)
            with pytest.raises(RolloutError, match="version 1 are not finite"):
                await answers(harness.rollout, [request(0, [3])])
            await harness.push(2)
            await answers(harness.rollout, [request(0, [3])])

    run(test())


@pytest.mark.parametrize("key", ["max_concurrent", "max_prefill_tokens"])
def test_bounds_are_above_zero(key: str) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
    with pytest.raises(ConfigError, match=key):
        load(Recipe, recipe, [f"rollout.{key}=0"])
