import gc
import logging
from typing import Any

import pytest
import torch

from ebbtide.device import Device, DeviceMemory
from ebbtide.memory.handoff import Handoff, HandoffCall, HandoffTotal
from ebbtide.units import MIB


class CachingDevice(Device):
    """A device with an allocator of its own: live bytes, and cached ones that `empty_cache` hands back."""

    live, cached = 3 * MIB, 5 * MIB

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.live, self.live + type(self).cached, 0, 0)

    def empty_cache(self) -> None:
        type(self).cached = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(CachingDevice, "cached", 5 * MIB)
    return CachingDevice("cpu")


def test_unused_blocks_go_back_and_live_ones_stay(device: Device) -> None:
    call = Handoff(device).release("before wake")
    assert (call.freed_bytes, call.kept_bytes) == (5 * MIB, 3 * MIB)
    assert call.seconds >= 0


def test_the_audit_sums_by_boundary_and_counts_calls_that_freed_nothing(device: Device) -> None:
    handoff = Handoff(device)
    handoff.release("before wake")
    handoff.release("before wake")
    handoff.release("after push")
    first, second = handoff.audit()
    assert (first.boundary, first.num_calls, first.num_idle, first.freed_bytes) == ("before wake", 2, 1, 5 * MIB)
    assert (second.boundary, second.num_calls, second.num_idle, second.freed_bytes) == ("after push", 1, 1, 0)


def test_each_call_is_logged_with_bytes_and_time(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ebbtide.memory"):
        Handoff(device).release("before wake")
    [line] = caplog.messages
    assert line.startswith("before wake: freed 5.0 MiB in ")
    assert line.endswith(", 3.0 MiB stay reserved")


def test_texts() -> None:
    assert str(HandoffCall("a", 1536, 0, 0.0123)) == "a: freed 1.5 KiB in 12 ms, 0 B stay reserved"
    assert str(HandoffTotal("a", 3, 1, MIB, 2.0)) == "a: 3 calls freed 1.0 MiB in 2.0 s, 1 freed nothing"


def test_nothing_is_collected() -> None:
    runs: list[str] = []

    def watch(phase: str, info: dict[str, Any]) -> None:
        runs.append(phase)

    handoff = Handoff(Device("cpu"))
    gc.disable()
    gc.callbacks.append(watch)
    try:
        for _ in range(10):
            handoff.release("before wake")
    finally:
        gc.callbacks.remove(watch)
        gc.enable()
    assert runs == []


@pytest.mark.gpu
def test_the_drivers_free_memory_grows_by_what_was_freed() -> None:
    device = Device.of("cuda")
    kept = torch.ones(64 * MIB, dtype=torch.uint8, device=device.torch)
    torch.ones(256 * MIB, dtype=torch.uint8, device=device.torch)
    free_before, _ = torch.cuda.mem_get_info()
    call = Handoff(device).release("before wake")
    free_after, _ = torch.cuda.mem_get_info()
    assert call.freed_bytes >= 256 * MIB
    assert free_after - free_before == call.freed_bytes
    assert int(kept.sum()) == 64 * MIB
