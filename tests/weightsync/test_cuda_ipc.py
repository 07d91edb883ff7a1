"""The device path on the CPU, over a stand-in for the driver; what is marked `gpu` runs the real calls."""

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import pytest
import torch

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync import CopyInto, CudaIpcTransport, NamedTensor, SenderOptions, SocketReceiver
from ebbtide.weightsync.cuda_ipc import CudaBuffer, CudaMapping, _index_of
from ebbtide.weightsync.messages import CudaHandle, Entry
from tests.weightsync.fake_ipc import FakeIpc

BUCKET = 4096


def entry(name: str, dtype: str, count: int, offset: int = 0) -> Entry:
    return Entry(name, dtype, (count,), offset, 0, count)


def test_both_ends_see_one_memory_and_views_are_counted_by_name() -> None:
    calls = FakeIpc()
    buffer = CudaBuffer(BUCKET, calls)
    mapping = CudaMapping(buffer.export(), BUCKET, calls)
    buffer.write(1, 128, torch.arange(4, dtype=torch.bfloat16))
    buffer.synchronize()
    first = mapping.view(1, entry("a", "bfloat16", 4, 128), torch.bfloat16)
    second = mapping.view(0, entry("b", "float32", 2), torch.float32)
    assert first.tolist() == [0, 1, 2, 3]
    assert mapping.kept() == ["a", "b"]
    del second
    assert mapping.kept() == ["a"]
    derived = first[1:].view(torch.uint8)
    del first
    assert mapping.kept() == ["a", "b"]  # known by the count alone, so every candidate is named
    assert not mapping.close()
    del derived
    assert mapping.kept() == []
    assert mapping.close()
    assert mapping.close()
    buffer.free()
    assert calls.counts_at_free == [0]


def test_the_device_is_synchronised_before_a_bucket_is_announced_and_before_it_is_acknowledged() -> None:
    order: list[str] = []

    class Noted(FakeIpc):
        def synchronize(self) -> None:
            order.append("synchronize")

    calls = Noted()

    async def run() -> None:
        transport = CudaIpcTransport(SenderOptions(bucket_bytes=BUCKET, deadline_s=5), calls=calls)
        transport._receiver = SocketReceiver(transport.address, deadline_s=5, open_buffer=calls.open_buffer)
        await asyncio.gather(transport.send([("a", torch.ones(5))], 1), transport.receive(load, 1))
        order.append("done")
        await transport.close()

    def load(_: Sequence[NamedTensor]) -> None:
        order.append("load")

    asyncio.run(run())
    assert order[: order.index("done")] == ["synchronize", "load", "synchronize"]


def test_memory_of_another_size_is_refused() -> None:
    calls = FakeIpc()
    buffer = CudaBuffer(BUCKET, calls)
    with pytest.raises(WeightSyncError, match="another size"):
        CudaMapping(buffer.export(), 2 * BUCKET, calls)
    buffer.free()


class Properties:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


def test_the_device_is_found_by_uuid_however_this_process_numbers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = ["GPU-b", "GPU-a"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties(visible[index]))
    assert _index_of("GPU-a") == 1
    with pytest.raises(WeightSyncError, match=r"plan\.device='GPU-c': this process sees 2 devices"):
        _index_of("GPU-c")


def test_the_handle_is_plain_fields() -> None:
    assert CudaHandle.__struct_fields__ == (
        "device_uuid",
        "handle",
        "num_bytes",
        "offset_bytes",
        "ref_counter",
        "ref_counter_offset",
        "event",
        "must_wait_for_event",
    )


# On a real device.


def _receive(address: str, pipe: Connection, num_pushes: int) -> None:
    targets = {"a": torch.zeros(3000, device="cuda"), "b": torch.zeros(17, dtype=torch.bfloat16, device="cuda")}
    receiver = SocketReceiver(address, deadline_s=60)
    for version in range(num_pushes):
        receiver.receive_blocking(CopyInto(targets), version)
        pipe.send({name: float(tensor.double().sum()) for name, tensor in targets.items()})
    receiver.close_blocking()


@pytest.mark.gpu
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("place", [lambda t: t.cuda(), lambda t: t], ids=["device", "host"])
def test_pushes_between_processes_leave_the_device_as_it_was(
    keeps: bool, place: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    options = SenderOptions(bucket_bytes=BUCKET, keep_buffer=keeps, has_digest=True, deadline_s=60, is_debug=True)
    sender = CudaIpcTransport(options, torch.device("cuda", 0)).sender
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(sender.address, theirs, 5))
    process.start()
    allocated = []
    for version in range(5):
        weights = [("a", place(torch.full((3000,), float(version)))), ("b", place(torch.ones(17).bfloat16()))]
        sender.send_blocking(weights, version)
        assert ours.recv() == {"a": 3000.0 * version, "b": 17.0}
        del weights
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    process.join(60)
    sender.close_blocking()
    assert len(set(allocated[1:])) == 1
    assert allocated[-1] == (2 * BUCKET if keeps else 0)
