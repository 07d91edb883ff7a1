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


def figures() -> tuple[int, int, int]:
    """Descriptors, mappings of a push's buffer, live storages."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:ebbtide-push")
    storages = sum(issubclass(type(item), torch.UntypedStorage) for item in gc.get_objects())
    return len(list(Path("/proc/self/fd").iterdir())), maps, storages


def weights(version: int) -> Iterator[NamedTensor]:
    for name, shape in SHAPES.items():
        yield name, torch.full(shape, float(version))


def receive(address: str, pipe: Connection) -> None:
    gc.disable()
    torch.set_num_threads(1)
    targets = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    consumer, receiver = CopyInto(targets), SocketReceiver(address)
    seen = []
    for version in range(NUM_PUSHES):
        receiver.receive_blocking(consumer, version)
        assert all(bool((tensor == version).all()) for tensor in targets.values())
        if version in (20, NUM_PUSHES - 1):
            seen.append((*figures(), host_memory().rss_bytes))
    receiver.close_blocking()
    pipe.send(seen)


@pytest.mark.parametrize("keeps", [True, False])
def test_nothing_grows(keeps: bool) -> None:
    sender = MemfdTransport(SenderOptions(bucket_bytes=MIB // 4, keep_buffer=keeps, has_digest=True)).sender
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(sender.address, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    seen = []
    gc.disable()
    try:
        for version in range(NUM_PUSHES):
            sender.send_blocking(weights(version), version)
            if version in (20, NUM_PUSHES - 1):
                seen.append((*figures(), host_memory().rss_bytes))
            assert sender.num_live_buffers == int(keeps)
        theirs_seen = ours.recv() if ours.poll(30) else []
    finally:
        gc.enable()
        sender.close_blocking()
        process.join(10)
        if process.is_alive():
            process.kill()
    for early, late in (seen, theirs_seen):
        assert late[:3] == early[:3]
        assert late[3] - early[3] < MIB
