"""The race that the order of release exists for: acknowledge first, release after, and a buffer is stranded a push."""

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

import ebbtide.weightsync.receiver as receiver_module
from ebbtide.weightsync import CudaIpcTransport, NamedTensor, SenderOptions, SocketReceiver
from ebbtide.weightsync.cuda_ipc import CudaMapping
from ebbtide.weightsync.machine.events import Arrived, Finish, Send, Unmap, Unmapped
from ebbtide.weightsync.machine.receiver import (
    ReceiverAction,
    ReceiverEvent,
    ReceiverPhase,
    ReceiverState,
    receiver_step,
)
from ebbtide.weightsync.messages import Close, Closed
from tests.weightsync.fake_ipc import FakeIpc

BUCKET = 4096
NUM_PUSHES = 5


def push_repeatedly(calls: FakeIpc) -> None:
    """Pushes that give the buffer back each time, to a receiver in another thread."""

    async def run() -> None:
        options = SenderOptions(bucket_bytes=BUCKET, keep_buffer=False, deadline_s=5)
        transport = CudaIpcTransport(options, calls=calls)
        transport._receiver = SocketReceiver(transport.address, deadline_s=5, open_buffer=calls.open_buffer)
        for version in range(NUM_PUSHES):
            weights: list[NamedTensor] = [("a", torch.ones(700)), ("b", torch.ones(3000))]
            await asyncio.gather(transport.send(weights, version), transport.receive(lambda _: None, version))
        await transport.close()

    asyncio.run(run())


@pytest.fixture
def slow_to_unmap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a mapping takes a moment, as it does on a device; whoever does not wait for it loses the race."""
    close = CudaMapping.close

    def slowly(self: CudaMapping) -> bool:
        time.sleep(0.05)
        return close(self)

    monkeypatch.setattr(CudaMapping, "close", slowly)


def acknowledge_then_release(state: ReceiverState, event: ReceiverEvent) -> tuple[ReceiverState, list[ReceiverAction]]:
    """The receiver's machine with the old order put back."""
    if isinstance(event, Arrived) and isinstance(event.frame, Close):
        return replace(state, phase=ReceiverPhase.CLOSING), [Send(0, Closed()), Unmap()]
    if isinstance(event, Unmapped) and state.phase is ReceiverPhase.CLOSING:
        return replace(state, phase=ReceiverPhase.IDLE, is_mapped=False), [Finish()]
    return receiver_step(state, event)


@pytest.mark.usefixtures("slow_to_unmap")
def test_the_old_order_strands_a_buffer_with_every_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "receiver_step", acknowledge_then_release)
    calls = FakeIpc()
    push_repeatedly(calls)
    assert calls.counts_at_free == [1] * NUM_PUSHES
    assert len(calls.limbo) >= 1  # of the last push at least: nothing drains it any more
    assert sum(calls.limbo.values()) >= 2 * BUCKET


@pytest.mark.usefixtures("slow_to_unmap")
def test_in_the_right_order_nobody_has_the_buffer_open_when_it_is_freed() -> None:
    calls = FakeIpc()
    push_repeatedly(calls)
    assert calls.counts_at_free == [0] * NUM_PUSHES
    assert calls.limbo == {}


def test_several_receivers_count_one_by_one() -> None:
    calls = FakeIpc()

    async def run() -> None:
        options = SenderOptions(num_receivers=3, bucket_bytes=BUCKET, keep_buffer=False, deadline_s=5)
        transport = CudaIpcTransport(options, calls=calls)
        receivers = [
            SocketReceiver(transport.address, rank, deadline_s=5, open_buffer=calls.open_buffer) for rank in range(3)
        ]
        for version in range(3):
            await asyncio.gather(
                transport.send(weights(), version),
                *(receiver.receive(lambda _: None, version) for receiver in receivers),
            )
        for receiver in receivers:
            await receiver.close()
        await transport.close()

    asyncio.run(run())
    assert calls.counts_at_free == [0, 0, 0]


def weights() -> Iterator[NamedTensor]:
    for i in range(9):
        yield str(i), torch.ones(900)
