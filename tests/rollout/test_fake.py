"""What is the fake's own; the rest is the contract's (tests/contracts/test_rollout.py)."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import torch

from ebbtide.rollout.base import Awake
from ebbtide.rollout.fake import FakeRollout
from ebbtide.types import Completion, GenerateRequest, StopReason
from ebbtide.weightsync.inprocess import InProcessTransport
from ebbtide.weightsync.push import push
from tests.contracts.rollouts import EOS, answers, request, setting


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


async def awake(script: Any = None, **config: Any) -> FakeRollout:
    rollout = FakeRollout(FakeRollout.Config(**config), setting(), script)
    await push([("w", torch.zeros(2)), ("b", torch.zeros(1))], InProcessTransport(), rollout, 0)
    return rollout


def test_a_script_is_followed_and_then_it_ends() -> None:
    def script(request: GenerateRequest) -> Sequence[int]:
        return [5 + request.request_id, *request.prompt_ids.tolist()]

    async def test() -> None:
        rollout = await awake(script)
        found = await answers(rollout, [request(i, [3, 4], temperature=0.5 * i) for i in range(4)])
        for i, item in found.items():
            assert item.token_ids.tolist() == [5 + i, 3, 4, EOS]
            assert item.stop_reason == StopReason.EOS
            assert item.logprobs.tolist() == [0.0] * 4
            assert item.versions.tolist() == [0] * 4

    run(test())


def test_a_script_obeys_limits_and_stops() -> None:
    async def test() -> None:
        rollout = await awake(lambda _: [5, 6, 7, 8])
        cut = request(0, [3], max_tokens=2)
        stopped = request(1, [3], stop_ids=(7,))
        named = request(2, [3], stop=("34",))  # token 6 is "3" and token 7 is "4"
        found = await answers(rollout, [cut, stopped, named])
        assert (found[0].token_ids.tolist(), found[0].stop_reason) == ([5, 6], StopReason.LENGTH)
        assert (found[1].token_ids.tolist(), found[1].stop_reason) == ([5, 6, 7], StopReason.STOP)
        assert (found[2].token_ids.tolist(), found[2].stop_reason) == ([5, 6, 7], StopReason.STOP)

    run(test())


def test_an_interrupted_script_goes_on_where_it_was() -> None:
    async def test() -> None:
        rollout = await awake(lambda _: [5, 6, 7])
        ids = torch.tensor([5, 6])
        prefix = Completion(0, ids, torch.zeros(2), torch.zeros(2, dtype=torch.int32), StopReason.ABORTED)
        found = await answers(rollout, [request(0, [3], prefix=prefix)])
        assert found[0].token_ids.tolist() == [5, 6, 7, EOS]

    run(test())


def test_pushes_are_remembered_by_name() -> None:
    async def test() -> None:
        rollout = await awake()
        await push([("w", torch.zeros(2))], InProcessTransport(), rollout, 1)
        assert rollout.pushes == [(0, ("w", "b")), (1, ("w",))]
        assert rollout.state == Awake(1)

    run(test())


def test_a_version_changes_what_is_drawn_and_no_spread_is_uniform() -> None:
    rollout = FakeRollout(FakeRollout.Config(spread=2.0), setting())
    newest, positions = torch.tensor([3, 4, 3]), torch.tensor([0, 0, 1])
    first, second = rollout.logits(newest, positions, 0), rollout.logits(newest, positions, 1)
    assert len({tuple(row.tolist()) for row in [*first, *second]}) == 6
    assert float(first.min()) >= 0
    assert float(first.max()) < 2
    flat = FakeRollout(FakeRollout.Config(spread=0.0), setting())
    assert float(flat.logits(newest, positions, 0).abs().max()) == 0
