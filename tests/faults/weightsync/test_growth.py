"""Two hundred pushes in a row, nothing collected: descriptors, mappings, resident bytes and live storages stay flat."""

import gc
import multiprocessing
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from ebbtide.device import host_memory
from ebbtide.units import MIB
from ebbtide.weightsync import CopyInto, MemfdTransport, NamedTensor, SenderOptions, SocketReceiver

NUM_PUSHES = 200
SHAPES = {"embed": (256, 1024), "a": (64, 64), "b": (300,), "c": (100, 100)}


class Watch:
    """What must stay flat, early and late; resident bytes are read apart from the list of all objects."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int, int]] = []
        self.rss_bytes: list[int] = []

    def after(self, version: int) -> None:
        if version in (50, NUM_PUSHES - 1):
            self.rss_bytes.append(host_memory().rss_bytes)
        if version in (20, NUM_PUSHES - 1):
            maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:ebbtide-push")
            storages = sum(issubclass(type(item), torch.UntypedStorage) for item in gc.get_objects())
            self.counts.append((len(list(Path("/proc/self/fd").iterdir())), maps, storages))

    def assert_flat(self) -> None:
        assert self.counts[0] == self.counts[1]
        assert self.rss_bytes[1] - self.rss_bytes[0] < MIB


def weights(version: int) -> Iterator[NamedTensor]:
    for name, shape in SHAPES.items():
        yield name, torch.full(shape, float(version))


def receive(address: str, pipe: Connection) -> None:
    gc.disable()
    torch.set_num_threads(1)
    targets = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    consumer, receiver = CopyInto(targets), SocketReceiver(address)
    watch = Watch()
    for version in range(NUM_PUSHES):
        receiver.receive_blocking(consumer, version)
        assert all(bool((tensor == version).all()) for tensor in targets.values())
        watch.after(version)
    receiver.close_blocking()
    pipe.send(watch)


@pytest.mark.parametrize("keeps", [True, False])
def test_nothing_grows(keeps: bool) -> None:
    sender = MemfdTransport(SenderOptions(bucket_bytes=MIB // 4, keep_buffer=keeps, has_digest=True)).sender
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(sender.address, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    watch = Watch()
    gc.disable()
    try:
        for version in range(NUM_PUSHES):
            sender.send_blocking(weights(version), version)
            watch.after(version)
            assert sender.num_live_buffers == int(keeps)
        watched_there = ours.recv() if ours.poll(30) else None
    finally:
        gc.enable()
        sender.close_blocking()
        process.join(10)
        if process.is_alive():
            process.kill()
    watch.assert_flat()
    assert isinstance(watched_there, Watch), "the receiver did not finish"
    watched_there.assert_flat()
