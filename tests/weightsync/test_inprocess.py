import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync.base import NamedTensor
from ebbtide.weightsync.inprocess import InProcessTransport


class Consumer:
    """Keeps what `load` was given."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.seen: list[NamedTensor] = []
        self.fail_at = fail_at

    def load(self, weights: Sequence[NamedTensor]) -> None:
        for name, tensor in weights:
            if name == self.fail_at:
                raise ValueError("no such layer")
            self.seen.append((name, tensor))


async def both(
    transport: InProcessTransport,
    weights: Sequence[NamedTensor],
    consumer: Consumer,
    versions: tuple[int, int] = (1, 1),
) -> list[object]:
    return list(
        await asyncio.gather(
            transport.send(iter(weights), versions[0]),
            transport.receive(consumer.load, versions[1]),
            return_exceptions=True,
        )
    )


def test_the_trainers_storage_is_handed_over_without_a_copy_and_without_its_graph() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    consumer = Consumer()
    report, _ = asyncio.run(both(InProcessTransport(), [("w", weight)], consumer))
    [(name, given)] = consumer.seen
    assert name == "w"
    assert given.data_ptr() == weight.data_ptr()
    assert not given.requires_grad
    assert (report.version, report.num_bytes, report.num_tensors) == (1, 24, 1)  # type: ignore[attr-defined]


def test_another_dtype_and_owned_weights_are_copies() -> None:
    weight, ids = torch.ones(4), torch.arange(3)
    cast = Consumer()
    asyncio.run(both(InProcessTransport(dtype=torch.bfloat16), [("w", weight), ("ids", ids)], cast))
    assert [tensor.dtype for _, tensor in cast.seen] == [torch.bfloat16, torch.int64]
    assert cast.seen[1][1].data_ptr() == ids.data_ptr()
    owned = Consumer()
    asyncio.run(both(InProcessTransport(owned=True), [("w", weight)], owned))
    assert owned.seen[0][1].data_ptr() != weight.data_ptr()
    assert torch.equal(owned.seen[0][1], weight)


def test_weights_are_drawn_one_at_a_time() -> None:
    events: list[str] = []

    def weights() -> Iterator[NamedTensor]:
        for name in ("a", "b", "c"):
            events.append(f"draw {name}")
            yield name, torch.zeros(1)

    async def run() -> None:
        transport = InProcessTransport()
        await asyncio.gather(
            transport.send(weights(), 1), transport.receive(lambda some: events.append(f"load {some[0][0]}"), 1)
        )

    asyncio.run(run())
    assert events == ["draw a", "load a", "draw b", "load b", "draw c", "load c"]


def test_a_failing_load_fails_both_calls_and_the_next_push_works() -> None:
    async def run() -> None:
        transport = InProcessTransport()
        weights = [("a", torch.zeros(1)), ("b", torch.zeros(1))]
        outcomes = await both(transport, weights, Consumer(fail_at="b"))
        for outcome in outcomes:
            assert isinstance(outcome, WeightSyncError)
            assert "weight='b': the receiver's load raised ValueError: no such layer." in str(outcome)
            assert isinstance(outcome.__cause__, ValueError)
        assert outcomes[0] is not outcomes[1]
        report, nothing = await both(transport, weights, Consumer(), (2, 2))
        assert report.version == 2  # type: ignore[attr-defined]
        assert nothing is None

    asyncio.run(run())


def test_a_failing_iterator_fails_both_calls() -> None:
    def weights() -> Iterator[NamedTensor]:
        yield "a", torch.zeros(1)
        raise RuntimeError("gather failed")

    async def run() -> None:
        transport = InProcessTransport()
        outcomes = await asyncio.gather(
            transport.send(weights(), 1), transport.receive(Consumer().load, 1), return_exceptions=True
        )
        assert all(isinstance(outcome, WeightSyncError) for outcome in outcomes)
        assert all("the sender's weights raised RuntimeError: gather failed" in str(outcome) for outcome in outcomes)

    asyncio.run(run())


def test_another_version_fails_both_calls_and_nothing_is_loaded() -> None:
    consumer = Consumer()
    outcomes = asyncio.run(both(InProcessTransport(), [("a", torch.zeros(1))], consumer, versions=(3, 2)))
    assert all(isinstance(outcome, WeightSyncError) for outcome in outcomes)
    assert "version=3: the receiver waits for version 2." in str(outcomes[0])
    assert consumer.seen == []


@pytest.mark.parametrize("half", ["send", "receive"])
def test_waiting_for_nobody_is_bounded_and_leaves_the_transport_usable(half: str) -> None:
    async def run() -> None:
        transport = InProcessTransport(deadline_s=0.05)
        call = transport.send([("a", torch.zeros(1))], 1) if half == "send" else transport.receive(Consumer().load, 1)
        with pytest.raises(WeightSyncError, match=r"within 0\.05 s"):
            await call
        outcomes = await both(transport, [("a", torch.zeros(1))], Consumer())
        assert outcomes[1] is None

    asyncio.run(run())


@pytest.mark.parametrize("half", ["send", "receive"])
def test_a_half_that_is_cancelled_ends_the_other(half: str) -> None:
    async def run() -> None:
        transport = InProcessTransport()
        weights = ((str(i), torch.zeros(1)) for i in range(10_000_000))
        sending = asyncio.create_task(transport.send(weights, 1))
        receiving = asyncio.create_task(transport.receive(lambda _: None, 1))
        await asyncio.sleep(0.01)
        cancelled, other = (sending, receiving) if half == "send" else (receiving, sending)
        cancelled.cancel()
        with pytest.raises(WeightSyncError):
            await asyncio.wait_for(other, 2)
        assert cancelled.cancelled() or isinstance(cancelled.exception(), asyncio.CancelledError)
        assert (await both(transport, [("a", torch.zeros(1))], Consumer()))[1] is None

    asyncio.run(run())


def test_a_second_sender_and_a_closed_transport_are_refused() -> None:
    async def run() -> None:
        transport = InProcessTransport()
        sending = asyncio.create_task(transport.send([("a", torch.zeros(1))], 1))
        await asyncio.sleep(0)
        with pytest.raises(WeightSyncError, match="another send is under way"):
            await transport.send([], 1)
        await transport.receive(Consumer().load, 1)
        await sending
        await transport.close()
        with pytest.raises(WeightSyncError, match="is closed"):
            await transport.receive(Consumer().load, 2)

    asyncio.run(run())
