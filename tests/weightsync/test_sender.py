import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync import (
    Adapter,
    CopyInto,
    LoadAdapter,
    MemfdTransport,
    NamedTensor,
    SenderOptions,
    SocketReceiver,
)
from ebbtide.weightsync.memfd import MemfdBuffer, MemfdMapping
from ebbtide.weightsync.sender import SocketSender

BUCKET = 4096


@contextmanager
def pair(
    *, holds: int | None = None, num_receivers: int = 1, **options: object
) -> Iterator[tuple[SocketSender, list[SocketReceiver]]]:
    """A sender and its receivers, which run in threads of their own."""
    chosen = SenderOptions(bucket_bytes=BUCKET, deadline_s=5, num_receivers=num_receivers, **options)  # type: ignore[arg-type]
    sender = MemfdTransport(chosen).sender
    receivers = [SocketReceiver(sender.address, rank, deadline_s=5, holds=holds) for rank in range(num_receivers)]
    yield sender, receivers
    for receiver in receivers:
        receiver.close_blocking()
    sender.close_blocking()


def push(
    sender: SocketSender,
    receivers: Sequence[SocketReceiver],
    weights: Sequence[NamedTensor],
    version: int,
    load: Callable[[Sequence[NamedTensor]], None] = lambda _: None,
    adapter: Adapter | None = None,
    load_adapter: LoadAdapter | None = None,
) -> tuple[object, list[object]]:
    """What `send` and each `receive` returned or raised."""
    outcomes: list[object] = [None] * len(receivers)

    def receive(rank: int) -> None:
        try:
            receivers[rank].receive_blocking(load, version, load_adapter)
        except WeightSyncError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(len(receivers))]
    for thread in threads:
        thread.start()
    sent: object
    try:
        sent = sender.send_blocking(iter(weights), version, adapter)
    except WeightSyncError as error:
        sent = error
    for thread in threads:
        thread.join(20)
    return sent, outcomes


WEIGHTS = [("a", torch.arange(2000.0)), ("b", torch.ones(30, 7)), ("c", torch.zeros(5))]


def names_of(load_into: list[str]) -> Callable[[Sequence[NamedTensor]], None]:
    return lambda weights: load_into.extend(name for name, _ in weights)


# Digests.


def test_version_and_digest_are_in_the_log_of_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ebbtide.weightsync"), pair(has_digest=True) as (sender, receivers):
        report, _ = push(sender, receivers, WEIGHTS, 3)
        digest = f"{report.digest:016x}"  # type: ignore[attr-defined]
    lines = [line for line in caplog.messages if "version 3" in line or "version=3" in line]
    assert len(lines) == 2
    assert all(line.endswith(f"digest {digest}") for line in lines)


def test_bytes_that_change_on_the_way_are_refused_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = MemfdMapping.payload

    def flipped(self: MemfdMapping, half: int, num_bytes: int) -> memoryview:
        place = payload(self, half, num_bytes)
        if num_bytes:
            place[0] ^= 1
        return place

    monkeypatch.setattr(MemfdMapping, "payload", flipped)
    loaded: list[str] = []
    with pair(has_digest=True) as (sender, receivers):
        sent, [received] = push(sender, receivers, WEIGHTS, 1, names_of(loaded))
    assert isinstance(sent, WeightSyncError)
    assert "arrived with digest" in str(sent)
    assert "arrived with digest" in str(received)
    assert loaded == []


# Views that are kept.


@pytest.mark.parametrize("derive", [lambda t: t, lambda t: t[:2], lambda t: t.view(-1)[1:], lambda t: t.numpy()])
def test_a_kept_view_is_caught_by_name_and_the_next_push_works(derive: Callable[[torch.Tensor], object]) -> None:
    kept: list[object] = []

    def load(weights: Sequence[NamedTensor]) -> None:
        kept.extend(derive(tensor) for name, tensor in weights if name == "b")

    with pair() as (sender, receivers):
        sent, [received] = push(sender, receivers, WEIGHTS, 1, load)
        for outcome in (sent, received):
            assert "load returned and kept views of 'b'" in str(outcome)
        assert receivers[0].holds is None
        assert sender.num_live_buffers == 1  # the view keeps it mapped over there
        report, _ = push(sender, receivers, WEIGHTS, 2)
        assert report.version == 2  # type: ignore[attr-defined]
        kept.clear()
        push(sender, receivers, WEIGHTS, 3)
        push(sender, receivers, WEIGHTS, 4)
        assert sender.num_live_buffers == 1


def test_debug_mode_poisons_what_everyone_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where keeping goes unnoticed, the keeper reads NaN, and never the next bucket's values."""
    monkeypatch.setattr(MemfdMapping, "kept", lambda self: [])
    poisoned: list[int] = []
    poison = MemfdBuffer.poison

    def noted(self: MemfdBuffer, half: int) -> None:
        poisoned.append(half)
        poison(self, half)

    monkeypatch.setattr(MemfdBuffer, "poison", noted)
    kept: list[torch.Tensor] = []

    def load(weights: Sequence[NamedTensor]) -> None:
        kept.extend(tensor for name, tensor in weights if name == "c")

    with pair(is_debug=True) as (sender, receivers):
        report, _ = push(sender, receivers, WEIGHTS, 1, load)
        assert report.version == 1  # type: ignore[attr-defined]
        assert poisoned == [0, 1, 0]
        assert bool(kept[0].isnan().all())
        kept.clear()


# Changes only.


def test_a_delta_push_sends_what_changed_and_falls_back_where_the_base_differs() -> None:
    weights = {name: tensor.clone() for name, tensor in WEIGHTS}
    targets = {name: torch.full_like(tensor, -1) for name, tensor in WEIGHTS}
    with pair(is_delta=True) as (sender, receivers):
        first, _ = push(sender, receivers, list(weights.items()), 1, CopyInto(targets))
        weights["b"][3, 3] = 7
        second, _ = push(sender, receivers, list(weights.items()), 2, CopyInto(targets))
        assert all(torch.equal(targets[name], tensor) for name, tensor in weights.items())
        third, _ = push(sender, receivers, list(weights.items()), 3, CopyInto(targets))
        receivers[0].close_blocking()
        receivers[0] = SocketReceiver(sender.address, deadline_s=5)  # it starts anew and holds nothing
        fourth, _ = push(sender, receivers, list(weights.items()), 4, CopyInto(targets))
    kinds = [(report.kind, report.num_tensors) for report in (first, second, third, fourth)]  # type: ignore[attr-defined]
    assert kinds == [("full", 3), ("delta", 1), ("delta", 0), ("full", 3)]


def test_a_delta_push_after_a_broken_one_is_full() -> None:
    weights = [(name, tensor.clone()) for name, tensor in WEIGHTS]

    def broken(_: Sequence[NamedTensor]) -> None:
        raise ValueError("torn")

    with pair(is_delta=True) as (sender, receivers):
        push(sender, receivers, weights, 1)
        weights[1][1].zero_()
        sent, _ = push(sender, receivers, weights, 2, broken)
        assert isinstance(sent, WeightSyncError)
        loaded: list[str] = []
        report, _ = push(sender, receivers, weights, 3, names_of(loaded))
    assert report.kind == "full"  # type: ignore[attr-defined]
    assert loaded == ["a", "b", "c"]


# Adapters.

LORA = Adapter("policy", rank=2, alpha=4.0, target_modules=("q_proj",))
LORA_WEIGHTS = [("q_proj.lora_A", torch.ones(2, 900)), ("q_proj.lora_B", torch.full((900, 2), 2.0))]


def test_an_adapter_arrives_whole_in_one_call_and_is_the_consumers_own() -> None:
    taken: list[tuple[Adapter, list[NamedTensor]]] = []
    with pair(holds=0) as (sender, receivers):
        report, outcomes = push(
            sender, receivers, LORA_WEIGHTS, 1, adapter=LORA, load_adapter=lambda a, w: taken.append((a, list(w)))
        )
        assert (report.kind, outcomes, receivers[0].holds) == ("adapter", [None], 1)  # type: ignore[attr-defined]
    [(adapter, weights)] = taken
    assert adapter == LORA
    assert [name for name, _ in weights] == ["q_proj.lora_A", "q_proj.lora_B"]
    assert all(torch.equal(tensor, sent) for (_, tensor), (_, sent) in zip(weights, LORA_WEIGHTS, strict=True))


def test_an_adapter_needs_complete_weights_below_it_and_a_receiver_that_takes_it() -> None:
    with pair() as (sender, receivers):
        sent, _ = push(sender, receivers, LORA_WEIGHTS, 1, adapter=LORA, load_adapter=lambda a, w: None)
        assert "no complete weights to put it on" in str(sent)
    with pair(holds=0) as (sender, receivers):
        sent, _ = push(sender, receivers, LORA_WEIGHTS, 1, adapter=LORA)
        assert "takes no adapters" in str(sent)


# Several receivers.


def test_every_receiver_gets_everything_and_one_failure_is_everyones() -> None:
    targets = [{name: torch.zeros_like(tensor) for name, tensor in WEIGHTS} for _ in range(4)]
    with pair(num_receivers=4) as (sender, receivers):
        loads = iter([CopyInto(target) for target in targets])
        lock, chosen = threading.Lock(), threading.local()

        def load(weights: Sequence[NamedTensor]) -> None:
            if not hasattr(chosen, "load"):
                with lock:
                    chosen.load = next(loads)
            chosen.load(weights)

        _, outcomes = push(sender, receivers, WEIGHTS, 1, load)
        assert outcomes == [None] * 4
        assert all(torch.equal(target[name], tensor) for target in targets for name, tensor in WEIGHTS)

        def one_breaks(weights: Sequence[NamedTensor]) -> None:
            if any(name == "b" for name, _ in weights) and lock.acquire(blocking=False):
                raise ValueError("torn")

        sent, outcomes = push(sender, receivers, WEIGHTS, 2, one_breaks)
        assert isinstance(sent, WeightSyncError)
        assert all(isinstance(outcome, WeightSyncError) and "torn" in str(outcome) for outcome in outcomes)
        assert [receiver.holds for receiver in receivers] == [None] * 4


# Weights that cannot travel, options that cannot be.


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "weight='a': came twice in one push"),
        ([("a", torch.empty(3, device="meta"))], "has no plain bytes"),
        ([("a", torch.ones(2, 2).to_sparse())], "has no plain bytes"),
        ([("n" * 5000, torch.ones(2))], "a name has at most 4096 bytes"),
    ],
)
def test_weights_that_cannot_travel_are_named(weights: list[NamedTensor], text: str) -> None:
    with pair() as (sender, receivers):
        sent, [received] = push(sender, receivers, weights, 1)
        assert text in str(sent)
        assert text in str(received)


def test_wrong_options_are_reported_together() -> None:
    with pytest.raises(WeightSyncError) as caught:
        SenderOptions(num_receivers=0, bucket_bytes=100, deadline_s=0)
    assert str(caught.value).count("\n") == 2
    assert "weightsync.bucket_bytes=100: a multiple of 64 above 0." in str(caught.value)


def test_a_second_push_at_a_time_is_refused() -> None:
    async def run() -> None:
        transport = MemfdTransport(SenderOptions(bucket_bytes=BUCKET, deadline_s=5))
        sending = asyncio.create_task(transport.send(WEIGHTS, 1))
        await asyncio.sleep(0.1)
        with pytest.raises(WeightSyncError, match="another push is under way"):
            await transport.send(WEIGHTS, 1)
        await transport.receive(lambda _: None, 1)
        await sending
        await transport.close()

    asyncio.run(run())
