import asyncio
from collections.abc import Sequence

import pytest
import torch

from ebbtide.errors import RolloutError, WeightSyncError
from ebbtide.weightsync.base import NamedTensor, WeightReceiver
from ebbtide.weightsync.inprocess import InProcessTransport
from ebbtide.weightsync.push import push


class Rollout:
    """Copies weights in; refuses before or breaks during a push where told to."""

    def __init__(self, refuse: bool = False, fail_at: str | None = None) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.refuse, self.fail_at = refuse, fail_at

    async def receive_weights(self, version: int, source: WeightReceiver) -> None:
        if self.refuse:
            raise RolloutError("asleep")
        await source.receive(self._load, version)

    def _load(self, weights: Sequence[NamedTensor]) -> None:
        for name, tensor in weights:
            if name == self.fail_at:
                raise KeyError(name)
            self.weights[name] = tensor.clone()


WEIGHTS = [("a", torch.arange(3.0)), ("b", torch.ones(2, 2))]


def test_push_moves_every_weight() -> None:
    rollout = Rollout()
    report = asyncio.run(push(WEIGHTS, InProcessTransport(), rollout, 7))
    assert (report.version, report.num_bytes, report.num_tensors) == (7, 28, 2)
    assert all(torch.equal(rollout.weights[name], tensor) for name, tensor in WEIGHTS)


def test_a_broken_push_raises_one_error_and_leaves_no_task() -> None:
    async def run() -> None:
        transport = InProcessTransport()
        with pytest.raises(WeightSyncError, match="weight='b'") as caught:
            await push(WEIGHTS, transport, Rollout(fail_at="b"), 1)
        assert isinstance(caught.value.__cause__, KeyError)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert (await push(WEIGHTS, transport, Rollout(), 2)).version == 2

    asyncio.run(run())


def test_a_rollout_that_refuses_is_heard_as_itself() -> None:
    with pytest.raises(RolloutError, match="asleep"):
        asyncio.run(push(WEIGHTS, InProcessTransport(), Rollout(refuse=True), 1))
