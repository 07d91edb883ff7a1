from dataclasses import dataclass, field

import pytest
import torch

from ebbtide.device import Device, DeviceMemory, host_memory, reset_host_peak
from ebbtide.errors import ConfigError
from ebbtide.memory import ledger as ledger_module
from ebbtide.memory.ledger import Ledger, Outcome, PhaseRecord

MIB = 1024 * 1024
CPU = Device("cpu")


@dataclass(frozen=True)
class ScriptedDevice(Device):
    """A device whose allocator is a few numbers that the test sets."""

    held: dict[str, int] = field(default_factory=lambda: {"now": 0, "peak": 0, "reserved": 0, "waits": 0})

    def synchronize(self) -> None:
        self.held["waits"] += 1

    def memory(self) -> DeviceMemory:
        now, peak, reserved = self.held["now"], self.held["peak"], self.held["reserved"]
        return DeviceMemory(now, reserved, max(now, peak), reserved)

    def reset_peak(self) -> None:
        self.held["peak"] = self.held["now"]

    def allocate(self, num_bytes: int) -> None:
        self.held["now"] += num_bytes
        self.held["peak"] = max(self.held["peak"], self.held["now"])
        self.held["reserved"] = max(self.held["reserved"], self.held["now"])


def test_a_phase_has_seconds_and_host_bytes() -> None:
    ledger = Ledger(CPU)
    with ledger.phase("generate"):
        assert ledger.open_phases == ["generate"]
    metrics = ledger.step_metrics()
    assert set(metrics) == {
        "time/generate_s",
        "memory/generate_peak_rss_bytes",
        "memory/generate_exit_rss_bytes",
    }
    assert metrics["time/generate_s"] > 0
    assert 0 < metrics["memory/generate_exit_rss_bytes"] <= metrics["memory/generate_peak_rss_bytes"]
    assert ledger.step_metrics() == {}


def test_the_peak_is_of_the_phase_and_not_of_the_process() -> None:
    ledger = Ledger(CPU)
    with ledger.phase("large"):
        block = torch.ones(64 * MIB, dtype=torch.uint8)
        del block
    with ledger.phase("small"):
        pass
    large, small = ledger.records
    assert large.peak_rss_bytes - large.entry.rss_bytes > 50 * MIB
    assert large.peak_rss_bytes - large.exit.rss_bytes > 50 * MIB
    assert small.peak_rss_bytes - small.entry.rss_bytes < 10 * MIB


def test_a_peak_below_that_of_the_process_is_seen() -> None:
    if not reset_host_peak():
        pytest.skip("this kernel does not let a process start a new peak")
    before = torch.ones(128 * MIB, dtype=torch.uint8)
    del before
    ledger = Ledger(CPU)
    with ledger.phase("update"):
        block = torch.ones(48 * MIB, dtype=torch.uint8)
        del block
    (record,) = ledger.records
    assert 40 * MIB < record.peak_rss_bytes - record.entry.rss_bytes < 64 * MIB


def test_the_host_peak_of_an_inner_phase_counts_for_the_outer() -> None:
    ledger = Ledger(CPU)
    with ledger.phase("update"):
        with ledger.phase("forward"):
            block = torch.ones(48 * MIB, dtype=torch.uint8)
            del block
        with ledger.phase("backward"):
            pass
    _, backward, update = ledger.records
    assert update.peak_rss_bytes - update.entry.rss_bytes > 40 * MIB
    assert backward.peak_rss_bytes - backward.entry.rss_bytes < 16 * MIB


def test_the_peak_of_an_inner_phase_counts_for_the_outer_and_a_peak_before_it_is_kept() -> None:
    device = ScriptedDevice("cuda")
    ledger = Ledger(device)
    with ledger.phase("update"):
        device.allocate(500)
        device.allocate(-400)
        with ledger.phase("forward"):
            device.allocate(200)
            device.allocate(-200)
        with ledger.phase("optimizer"):
            pass
    forward, optimizer, update = ledger.records
    assert [forward.name, optimizer.name, update.name] == ["update.forward", "update.optimizer", "update"]
    assert (forward.peak_allocated_bytes, optimizer.peak_allocated_bytes) == (300, 100)
    assert update.peak_allocated_bytes == 500
    assert (update.entry.allocated_bytes, update.exit.allocated_bytes) == (0, 100)

    with ledger.phase("update"), ledger.phase("forward"):
        device.allocate(900)
        device.allocate(-900)
    assert ledger.records[-1].name == "update"
    assert ledger.records[-1].peak_allocated_bytes == 1000


def test_the_device_is_waited_for_and_read_on_both_sides_of_a_phase() -> None:
    device = ScriptedDevice("cuda")
    ledger = Ledger(device)
    with ledger.phase("update"):
        assert device.held["waits"] == 1
        device.allocate(100)
    assert device.held["waits"] == 2
    metrics = ledger.step_metrics()
    assert {key: value for key, value in metrics.items() if "rss" not in key and not key.startswith("time/")} == {
        "memory/update_peak_allocated_bytes": 100,
        "memory/update_exit_allocated_bytes": 100,
        "memory/update_peak_reserved_bytes": 100,
        "memory/update_exit_reserved_bytes": 100,
    }


def test_a_clean_up_runs_at_the_boundary_and_says_what_it_freed() -> None:
    device = ScriptedDevice("cuda")
    ledger = Ledger(device)

    def give_back() -> None:
        device.held["reserved"] = device.held["now"]

    with ledger.phase("update", clean_up=give_back):
        device.allocate(64 * MIB)
        device.allocate(-64 * MIB)
        assert device.held["reserved"] == 64 * MIB
    record = ledger.records[-1]
    assert record.clean_up is not None
    assert abs(record.clean_up.freed_bytes - 64 * MIB) < 4 * MIB  # host bytes move a little
    assert 0 < record.clean_up.seconds < record.seconds
    assert record.exit.reserved_bytes == 0
    metrics = ledger.step_metrics()
    assert metrics["memory/update_clean_up_freed_bytes"] == record.clean_up.freed_bytes
    assert metrics["time/update_clean_up_s"] == record.clean_up.seconds


def test_an_exception_is_recorded_goes_on_and_still_cleans_up() -> None:
    ledger = Ledger(CPU)
    cleaned: list[str] = []

    def step() -> None:
        with ledger.phase("update", clean_up=lambda: cleaned.append("update")), ledger.phase("forward"):
            raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        step()
    assert [(record.name, record.outcome) for record in ledger.records] == [
        ("update.forward", Outcome.RAISED),
        ("update", Outcome.RAISED),
    ]
    assert cleaned == ["update"]
    assert ledger.open_phases == []
    with ledger.phase("generate"):
        pass
    assert ledger.records[-1].name == "generate"


def test_a_clean_up_that_raises_is_seen_and_leaves_the_books_closed() -> None:
    ledger = Ledger(CPU)

    def broken() -> None:
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"), ledger.phase("update", clean_up=broken):
        pass
    assert ledger.records[-1].outcome is Outcome.RAISED
    assert ledger.open_phases == []


def test_phases_of_one_name_add_up_within_a_step() -> None:
    device = ScriptedDevice("cuda")
    ledger = Ledger(device)
    for num_bytes in (300, 100):
        with ledger.phase("logprobs"):
            device.allocate(num_bytes)
            device.allocate(-num_bytes + 1)
    first, second = ledger.records
    metrics = ledger.step_metrics()
    assert metrics["time/logprobs_s"] == first.seconds + second.seconds
    assert metrics["memory/logprobs_peak_allocated_bytes"] == 300
    assert metrics["memory/logprobs_exit_allocated_bytes"] == 2


def test_records_carry_their_step_and_only_the_latest_are_kept() -> None:
    ledger = Ledger(CPU, step=7, keep=2)
    for _ in range(3):
        with ledger.phase("generate"):
            pass
        ledger.step_metrics()
    assert [record.step for record in ledger.records] == [8, 9]
    assert ledger.step == 10


def test_a_store_is_told_of_entry_and_exit() -> None:
    written: list[PhaseRecord] = []
    ledger = Ledger(CPU, write=written.append)
    with ledger.phase("update"), ledger.phase("forward"):
        assert [record.outcome for record in written] == [Outcome.OPEN, Outcome.OPEN]
    assert [(record.name, record.outcome) for record in written[2:]] == [
        ("update.forward", Outcome.DONE),
        ("update", Outcome.DONE),
    ]


def test_a_kernel_without_peaks_of_a_phase_reports_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "reset_host_peak", lambda: False)
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    process_peak = host_memory().peak_rss_bytes
    ledger = Ledger(CPU)
    with ledger.phase("generate"):
        pass
    record = ledger.records[-1]
    assert record.peak_rss_bytes == max(record.entry.rss_bytes, record.exit.rss_bytes) < process_peak


@pytest.mark.parametrize("name", ["", "two words", "update/forward", "a.b", "Update", "\u00e9"])
def test_a_name_that_cannot_be_a_metric_key_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="lower-case words joined by underscores"), Ledger(CPU).phase(name):
        pass


def test_leaving_out_of_order_is_our_bug_and_is_named() -> None:
    ledger = Ledger(CPU)
    first, second = ledger.phase("first"), ledger.phase("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(AssertionError, match=r"left first\.second"):
        second.__exit__(None, None, None)
