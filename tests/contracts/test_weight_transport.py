"""What every weight transport owes to both of its users; a new one is tested by being exported."""

import asyncio
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import ebbtide.weightsync as weightsync
from ebbtide.errors import WeightSyncError
from ebbtide.weightsync import (
    CudaIpcTransport,
    InProcessTransport,
    MemfdTransport,
    NamedTensor,
    ProcessGroupTransport,
    SenderOptions,
    SocketReceiver,
)
from tests.weightsync.fake_ipc import FakeIpc

BUCKET = 4096
DEADLINE_S = 20.0  # where nothing should wait for it
SHORT_S = 0.4  # where something waits for it


def options(deadline_s: float) -> SenderOptions:
    return SenderOptions(bucket_bytes=BUCKET, deadline_s=deadline_s, has_digest=True)


def cuda_ipc_over_a_stand_in(deadline_s: float) -> CudaIpcTransport:
    calls = FakeIpc()
    transport = CudaIpcTransport(options(deadline_s), calls=calls)
    transport._receiver = SocketReceiver(transport.address, deadline_s=deadline_s, open_buffer=calls.open_buffer)
    return transport


MAKE: dict[str, Callable[[float], Any]] = {
    "CudaIpcTransport": cuda_ipc_over_a_stand_in,
    "InProcessTransport": lambda deadline_s: InProcessTransport(deadline_s=deadline_s),
    "MemfdTransport": lambda deadline_s: MemfdTransport(options(deadline_s)),
    "ProcessGroupTransport": lambda deadline_s: ProcessGroupTransport(options(deadline_s)),
}
NAMES = [name for name in weightsync.__all__ if name.endswith("Transport")]
ABSTRACT = {"SocketTransport", "WeightTransport"}


@pytest.fixture(params=[name for name in NAMES if name not in ABSTRACT])
def make(request: pytest.FixtureRequest) -> Callable[[float], Any]:
    return MAKE[request.param]


class Consumer:
    """Copies what it is given; raises at a weight where told to."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.fail_at = fail_at

    def load(self, weights: Sequence[NamedTensor]) -> None:
        for name, tensor in weights:
            if name == self.fail_at:
                raise ValueError("no such layer")
            assert name not in self.weights
            self.weights[name] = tensor.clone()


def every_kind() -> list[NamedTensor]:
    """Every dtype, and every shape that a bucket could trip over; a bucket holds 4096 bytes."""
    torch.manual_seed(1)
    some = torch.randn(12, 8)
    weights = [
        ("embed", torch.randn(100, 64)),  # 25,600 bytes: more than six buckets
        ("exact", torch.arange(1024, dtype=torch.float32)),
        ("one_more", torch.arange(1025, dtype=torch.float32)),
        ("transposed", torch.randn(30, 50).T),
        ("strided", torch.randn(40, 40)[::3, ::2]),
        ("expanded", torch.randn(5, 1).expand(5, 7)),
        ("empty", torch.empty(0, 16)),
        ("scalar", torch.tensor(3.5)),
        ("parameter", torch.nn.Parameter(torch.randn(3, 3))),
        ("complex", torch.randn(9, dtype=torch.complex64).conj()),
        ("last", torch.randn(2000)),
    ]
    names = [
        "float16",
        "bfloat16",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
    ]
    weights += [(name, some.to(getattr(torch, name))) for name in [*names, "bool", "uint16", "float8_e4m3fnuz"]]
    return weights


async def both(
    transport: Any, weights: Any, consumer: Consumer, versions: tuple[int, int] = (1, 1)
) -> tuple[object, object]:
    outcomes: list[object] = await asyncio.gather(
        transport.send(weights, versions[0]), transport.receive(consumer.load, versions[1]), return_exceptions=True
    )
    return outcomes[0], outcomes[1]


def run(make: Callable[[float], Any], test: Callable[[Any], Any], deadline_s: float = DEADLINE_S) -> None:
    async def closed_at_the_end() -> None:
        transport = make(deadline_s)
        try:
            await test(transport)
        finally:
            await transport.close()

    asyncio.run(closed_at_the_end())


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def test_every_transport_is_tested() -> None:
    assert set(NAMES) - ABSTRACT == set(MAKE)


def test_every_weight_arrives_bit_for_bit(make: Callable[[float], Any]) -> None:
    async def test(transport: Any) -> None:
        for version in (1, 2, 3):
            consumer, weights = Consumer(), every_kind()
            report, nothing = await both(transport, iter(weights), consumer, (version, version))
            assert nothing is None
            assert isinstance(report, weightsync.PushReport), report
            assert report.version == version
            assert report.num_tensors == len(weights)
            assert report.num_bytes == sum(tensor.nbytes for _, tensor in weights)
            assert list(consumer.weights) == [name for name, _ in weights]
            for name, tensor in weights:
                arrived = consumer.weights[name]
                assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape), name
                assert bits(arrived) == bits(tensor), name

    run(make, test)


def test_a_push_of_nothing_is_a_push(make: Callable[[float], Any]) -> None:
    async def test(transport: Any) -> None:
        report, nothing = await both(transport, [], Consumer())
        assert (report.num_tensors, report.num_bytes, nothing) == (0, 0, None)  # type: ignore[attr-defined]

    run(make, test)


def test_weights_are_drawn_as_they_are_needed(make: Callable[[float], Any]) -> None:
    """Never more than the one that is sent and the one after it."""
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def weights() -> Iterator[NamedTensor]:
        nonlocal most
        for i in range(50):
            tensor = torch.zeros(100)
            storages.append(weakref.ref(tensor.untyped_storage()))
            most = max(most, sum(storage() is not None for storage in storages))
            yield str(i), tensor
            del tensor

    async def test(transport: Any) -> None:
        assert (await both(transport, weights(), Consumer()))[1] is None
        assert most <= 2

    run(make, test)


def test_a_failing_load_ends_both_with_its_own_words(make: Callable[[float], Any]) -> None:
    async def test(transport: Any) -> None:
        for outcome in await both(transport, every_kind(), Consumer(fail_at="transposed")):
            assert isinstance(outcome, WeightSyncError)
            assert "no such layer" in str(outcome)
        assert (await both(transport, every_kind(), Consumer(), (2, 2)))[1] is None

    run(make, test)


def test_failing_weights_end_both_with_their_own_words(make: Callable[[float], Any]) -> None:
    def weights() -> Iterator[NamedTensor]:
        yield from every_kind()[:6]
        raise RuntimeError("gather failed")

    async def test(transport: Any) -> None:
        for outcome in await both(transport, weights(), Consumer()):
            assert isinstance(outcome, WeightSyncError)
            assert "gather failed" in str(outcome)
        assert (await both(transport, every_kind(), Consumer(), (2, 2)))[1] is None

    run(make, test)


def test_another_version_ends_both_and_loads_nothing(make: Callable[[float], Any]) -> None:
    async def test(transport: Any) -> None:
        consumer = Consumer()
        for outcome in await both(transport, every_kind(), consumer, (3, 2)):
            assert isinstance(outcome, WeightSyncError)
            assert "2" in str(outcome)
            assert "3" in str(outcome)
        assert consumer.weights == {}
        assert (await both(transport, every_kind(), Consumer(), (4, 4)))[1] is None

    run(make, test)


@pytest.mark.parametrize("half", ["send", "receive"])
def test_a_half_alone_ends_at_its_deadline(make: Callable[[float], Any], half: str) -> None:
    async def test(transport: Any) -> None:
        call = transport.send(every_kind(), 1) if half == "send" else transport.receive(Consumer().load, 1)
        start = time.monotonic()
        with pytest.raises(WeightSyncError):
            await call
        assert time.monotonic() - start < SHORT_S + 5
        assert (await both(transport, [("a", torch.ones(9))], Consumer(), (2, 2)))[1] is None

    run(make, test, SHORT_S)


@pytest.mark.parametrize("half", ["send", "receive"])
def test_a_half_that_is_cancelled_ends_the_other(make: Callable[[float], Any], half: str) -> None:
    def weights() -> Iterator[NamedTensor]:
        for i in range(1_000_000):
            yield str(i), torch.zeros(100)

    async def test(transport: Any) -> None:
        sending = asyncio.create_task(transport.send(weights(), 1))
        receiving = asyncio.create_task(transport.receive(lambda _: time.sleep(0.001), 1))
        await asyncio.sleep(0.1)
        gone, other = (sending, receiving) if half == "send" else (receiving, sending)
        gone.cancel()
        with pytest.raises(WeightSyncError):
            await asyncio.wait_for(other, 10)
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (await both(transport, every_kind(), Consumer(), (2, 2)))[1] is None

    run(make, test)


def test_the_event_loop_lives_on_during_a_push(make: Callable[[float], Any]) -> None:
    async def test(transport: Any) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        weights = [(str(i), torch.zeros(900)) for i in range(100)]
        assert (await both(transport, weights, Consumer()))[1] is None
        ticking.cancel()
        assert ticks >= 50

    run(make, test)


def test_a_closed_transport_refuses_and_closes_again(make: Callable[[float], Any]) -> None:
    async def test(transport: Any) -> None:
        assert (await both(transport, every_kind(), Consumer()))[1] is None
        await transport.close()
        for call in (transport.send([], 2), transport.receive(Consumer().load, 2)):
            with pytest.raises(WeightSyncError, match="closed"):
                await call

    run(make, test)
