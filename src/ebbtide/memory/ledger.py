"""What each phase of a step took: seconds, host bytes and device bytes at entry, peak and exit.

Every phase of the loop is entered through `Ledger.phase`. Order of events:

    enter: wait for the device -> read memory -> start new peaks -> start the clock
    leave: wait for the device -> stop the clock -> run the clean-up -> read memory -> record

A phase inside another is named by its path (`update.forward`), so that seconds of top-level phases add up to the
step's; its peak counts for the outer phase too. Peaks belong to the process: one ledger a process, driven by one
thread, and nothing else resets them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from ebbtide.device import Device, DeviceMemory, HostMemory, host_memory, reset_host_peak
from ebbtide.errors import ConfigError, problem

__all__ = ["CleanUp", "Ledger", "MemoryReading", "Outcome", "PhaseRecord"]


class Outcome(StrEnum):
    """How far a phase had come when its record was written."""

    OPEN = "open"  # entered and not left; what remains of a phase in which the process died
    DONE = "done"  # left normally
    RAISED = "raised"  # left by an exception, which went on to the caller


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes at one moment; the device's are 0 on the CPU, which has no allocator of its own."""

    rss_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class CleanUp:
    """What the clean-up at a phase's exit achieved.

    Attributes:
        seconds: its duration, which is part of the phase's.
        freed_bytes: host bytes and reserved device bytes that it gave back; negative where they grew.
    """

    seconds: float
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """One phase of one step.

    Attributes:
        step: the step that the phase belongs to.
        name: the phase's path, outermost first, joined by dots.
        outcome: how it ended.
        started_s: seconds since the epoch at entry.
        seconds: from entry to exit, the clean-up included; 0 while open.
        entry: memory at entry.
        exit: memory at exit, after the clean-up; that at entry while open.
        peak_rss_bytes: the most that was resident in between. Where the kernel cannot start a new peak for a phase,
            the larger of entry and exit unless the phase set a new peak of the whole process.
        peak_allocated_bytes: the most that the device's allocator held in between.
        peak_reserved_bytes: the most that it had taken from the driver.
        clean_up: None where the phase has no clean-up.
    """

    step: int
    name: str
    outcome: Outcome
    started_s: float
    seconds: float
    entry: MemoryReading
    exit: MemoryReading
    peak_rss_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    clean_up: CleanUp | None = None


class Ledger:
    """Keeps the books of one process.

    Args:
        device: the device whose memory is read and whose queue is waited for.
        step: the number of the first step.
        keep: how many records stay readable in `records`, the latest ones.
        write: called with each record when a phase is entered (`Outcome.OPEN`) and again when it is left, so that a
            store that outlives the process knows where it died.

    Example:
        >>> ledger = Ledger(Device("cpu"))
        >>> with ledger.phase("generate"):
        ...     pass
        >>> sorted(ledger.step_metrics())
        ['memory/generate_exit_rss_bytes', 'memory/generate_peak_rss_bytes', 'time/generate_s']
    """

    def __init__(
        self, device: Device, *, step: int = 0, keep: int = 4096, write: Callable[[PhaseRecord], None] | None = None
    ) -> None:
        self.device = device
        self.step = step
        self.records: deque[PhaseRecord] = deque(maxlen=keep)
        self._write = write
        self._open: list[_Open] = []
        self._of_step: list[PhaseRecord] = []

    @property
    def open_phases(self) -> list[str]:
        """Paths of the phases that have been entered and not left, outermost first."""
        return [phase.name for phase in self._open]

    @contextmanager
    def phase(self, name: str, clean_up: Callable[[], object] | None = None) -> Iterator[None]:
        """Time a phase and read its memory; an exception inside is recorded and goes on.

        Args:
            name: lower-case words joined by underscores; part of metric keys.
            clean_up: called when the phase is left, also by an exception; for example `device.empty_cache`.

        Raises:
            ConfigError: the name cannot be part of a metric key.
        """
        if not (name.isidentifier() and name.isascii() and name == name.lower()):
            raise ConfigError(problem("phase", name, "must be lower-case words joined by underscores"))
        phase = self._enter(name)
        begin = time.perf_counter()
        outcome = Outcome.RAISED
        try:
            yield
            outcome = Outcome.DONE
        finally:
            self._leave(phase, begin, outcome, clean_up)

    def step_metrics(self) -> dict[str, float]:
        """The metrics of the phases left since the last call, and the begin of the next step.

        Phases of one name add their seconds and take the largest peak and the latest exit.
        """
        records, self._of_step = self._of_step, []
        self.step += 1
        metrics: dict[str, float] = {}
        for record in records:
            for key, value in _metrics(record, has_device=self.device.type != "cpu"):
                earlier = metrics.get(key, 0.0)
                if key.endswith(("_s", "_freed_bytes")):
                    metrics[key] = earlier + value
                elif "_peak_" in key:
                    metrics[key] = max(earlier, value)
                else:
                    metrics[key] = value
        return metrics

    def _enter(self, name: str) -> "_Open":
        self.device.synchronize()
        host, device = host_memory(), self.device.memory()
        if self._open:
            self._open[-1].raise_peaks(host, device)  # before the inner phase starts new ones
            name = f"{self._open[-1].name}.{name}"
        restarted = reset_host_peak()
        self.device.reset_peak()
        phase = _Open(
            name=name,
            started_s=time.time(),
            entry=_reading(host, device),
            process_peak_bytes=0 if restarted else host.peak_rss_bytes,
            peak_rss_bytes=host.rss_bytes,
            peak_allocated_bytes=device.allocated_bytes,
            peak_reserved_bytes=device.reserved_bytes,
        )
        self._open.append(phase)
        if self._write:
            self._write(phase.record(self.step, Outcome.OPEN, 0.0, phase.entry, None))
        return phase

    def _leave(self, phase: "_Open", begin: float, outcome: Outcome, clean_up: Callable[[], object] | None) -> None:
        assert phase in self._open, f"left {phase.name}, but what is open is {self.open_phases}"
        cleaned: CleanUp | None = None
        try:
            self.device.synchronize()
            if clean_up is not None:
                cleaned = self._clean(clean_up)
        except BaseException:
            outcome = Outcome.RAISED
            raise
        finally:
            seconds = time.perf_counter() - begin
            host, device = host_memory(), self.device.memory()
            phase.raise_peaks(host, device)
            del self._open[self._open.index(phase) :]  # with inner phases that an interrupt caught as they opened
            record = phase.record(self.step, outcome, seconds, _reading(host, device), cleaned)
            self._of_step.append(record)
            self.records.append(record)
            if self._write:
                self._write(record)

    def _clean(self, clean_up: Callable[[], object]) -> CleanUp:
        before, begin = _reading(host_memory(), self.device.memory()), time.perf_counter()
        clean_up()
        seconds = time.perf_counter() - begin
        after = _reading(host_memory(), self.device.memory())
        freed = before.rss_bytes - after.rss_bytes + before.reserved_bytes - after.reserved_bytes
        return CleanUp(seconds, freed)


@dataclass(slots=True, eq=False)
class _Open:
    """A phase that has been entered and not left, with the peaks known so far."""

    name: str
    started_s: float
    entry: MemoryReading
    process_peak_bytes: int  # at entry, where it could not be started anew; else 0
    peak_rss_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    def raise_peaks(self, host: HostMemory, device: DeviceMemory) -> None:
        """Take in readings made before an inner phase starts new peaks, or at exit; the last inner one's count."""
        is_own_peak = host.peak_rss_bytes > self.process_peak_bytes
        self.peak_rss_bytes = max(self.peak_rss_bytes, host.peak_rss_bytes if is_own_peak else host.rss_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, device.peak_allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, device.peak_reserved_bytes)

    def record(
        self, step: int, outcome: Outcome, seconds: float, at_exit: MemoryReading, clean_up: CleanUp | None
    ) -> PhaseRecord:
        return PhaseRecord(
            step=step,
            name=self.name,
            outcome=outcome,
            started_s=self.started_s,
            seconds=seconds,
            entry=self.entry,
            exit=at_exit,
            peak_rss_bytes=self.peak_rss_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            clean_up=clean_up,
        )


def _reading(host: HostMemory, device: DeviceMemory) -> MemoryReading:
    return MemoryReading(host.rss_bytes, device.allocated_bytes, device.reserved_bytes)


def _metrics(record: PhaseRecord, *, has_device: bool) -> Iterator[tuple[str, float]]:
    name = record.name
    yield f"time/{name}_s", record.seconds
    yield f"memory/{name}_peak_rss_bytes", float(record.peak_rss_bytes)
    yield f"memory/{name}_exit_rss_bytes", float(record.exit.rss_bytes)
    if has_device:
        yield f"memory/{name}_peak_allocated_bytes", float(record.peak_allocated_bytes)
        yield f"memory/{name}_exit_allocated_bytes", float(record.exit.allocated_bytes)
        yield f"memory/{name}_peak_reserved_bytes", float(record.peak_reserved_bytes)
        yield f"memory/{name}_exit_reserved_bytes", float(record.exit.reserved_bytes)
    if record.clean_up is not None:
        yield f"time/{name}_clean_up_s", record.clean_up.seconds
        yield f"memory/{name}_clean_up_freed_bytes", float(record.clean_up.freed_bytes)
