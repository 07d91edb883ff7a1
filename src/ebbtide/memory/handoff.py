"""Memory changes hands at phase boundaries: the trainer's unused blocks go back before the rollout takes its own.

Trainer and rollout share a device; what the trainer's caching allocator keeps unused, the rollout cannot map. A plain
`empty_cache` gives it back. It never frees a live tensor, and collecting Python garbage beside it frees nothing on
the device and costs the step a pause, so nothing here collects. Every call is accounted for, by bytes and seconds:
one that never frees anything is a wait in disguise, and the audit shows it.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.device import Device
from ebbtide.units import format_bytes, format_seconds

__all__ = ["Handoff", "HandoffCall", "HandoffTotal"]

_LOG = logging.getLogger("ebbtide.memory")


@dataclass(frozen=True, slots=True)
class HandoffCall:
    """One call.

    Attributes:
        boundary: where in the step, for example `before wake`.
        freed_bytes: that the allocator had reserved before and not after.
        kept_bytes: reserved still, by live tensors and the fragments beside them.
        seconds: what the call took.
    """

    boundary: str
    freed_bytes: int
    kept_bytes: int
    seconds: float

    def __str__(self) -> str:
        freed, kept = format_bytes(self.freed_bytes), format_bytes(self.kept_bytes)
        return f"{self.boundary}: freed {freed} in {format_seconds(self.seconds)}, {kept} stay reserved"


@dataclass(frozen=True, slots=True)
class HandoffTotal:
    """All calls at one boundary.

    Attributes:
        boundary: where in the step.
        num_calls: how often.
        num_idle: how many of them freed nothing.
        freed_bytes, seconds: summed.
    """

    boundary: str
    num_calls: int
    num_idle: int
    freed_bytes: int
    seconds: float

    def __str__(self) -> str:
        freed, took = format_bytes(self.freed_bytes), format_seconds(self.seconds)
        return f"{self.boundary}: {self.num_calls} calls freed {freed} in {took}, {self.num_idle} freed nothing"


class Handoff:
    """Hands a device's unused memory over, and keeps the account.

    Args:
        device: of the trainer.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._totals: dict[str, HandoffTotal] = {}

    def release(self, boundary: str) -> HandoffCall:
        """Give unused blocks back to the driver, and log what came of it.

        Args:
            boundary: names the place in the step; calls are summed by it.
        """
        before = self._device.memory().reserved_bytes
        start = time.perf_counter()
        self._device.empty_cache()
        seconds = time.perf_counter() - start
        after = self._device.memory().reserved_bytes
        call = HandoffCall(boundary, before - after, after, seconds)
        self._add(call)
        _LOG.info("%s", call)
        return call

    def audit(self) -> Iterator[HandoffTotal]:
        """The account so far, by boundary, in the order in which they first came."""
        yield from self._totals.values()

    def _add(self, call: HandoffCall) -> None:
        old = self._totals.get(call.boundary, HandoffTotal(call.boundary, 0, 0, 0, 0.0))
        self._totals[call.boundary] = HandoffTotal(
            call.boundary,
            old.num_calls + 1,
            old.num_idle + (call.freed_bytes <= 0),
            old.freed_bytes + call.freed_bytes,
            old.seconds + call.seconds,
        )
