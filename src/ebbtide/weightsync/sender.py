"""The sender's shell: carries out what its machine decides, over a listening socket and a buffer of some medium.

Blocking at heart, so that a plain loop can use it; `send` runs it in a thread of its own and leaves the event loop
free. One object serves all pushes of a run, to a fixed number of receivers.
"""

import logging
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec.structs import replace

from ebbtide.errors import WeightSyncError, problem
from ebbtide.weightsync.base import DEFAULT_DEADLINE_S, NamedTensor, PushReport
from ebbtide.weightsync.buckets import ALIGNMENT, Filler
from ebbtide.weightsync.delta import ChangeFilter
from ebbtide.weightsync.digests import bucket_digest, hex_digest
from ebbtide.weightsync.link import Incoming, Link, Listener
from ebbtide.weightsync.machine.events import (
    Arrived,
    Broke,
    Connected,
    Died,
    Drop,
    Expired,
    Fail,
    Fill,
    Filled,
    Finish,
    Free,
    MakePlan,
    Malformed,
    Planned,
    Quit,
    Recycle,
    Send,
    Start,
)
from ebbtide.weightsync.machine.sender import SenderAction, SenderEvent, sender_step
from ebbtide.weightsync.machine.sender_state import NUM_HALVES, LinkPhase, SenderState
from ebbtide.weightsync.medium import SendBuffer
from ebbtide.weightsync.messages import Adapter, Bucket, Failed, Frame, MalformedFrameError, Plan
from ebbtide.weightsync.worker import Wake, Worker, describe

__all__ = ["HOST_BUCKET_BYTES", "SenderOptions", "SocketSender"]

HOST_BUCKET_BYTES = 8 << 20
"""For host memory. Halves that stay in the last-level cache are fastest on quiet cores, larger ones where other
processes share them; this size is never far from the best, see benchmarks/weightsync.py."""

_LOG = logging.getLogger("ebbtide.weightsync")
_MAX_READ = 64  # frames of one peer in a row
_WORDS_S = 0.2  # how long a broken transfer waits for a receiver to say why
_FAREWELL_S = 1.0  # how long `close` waits for receivers that still have a buffer mapped


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """How to push.

    Attributes:
        run: names the run; receivers of another are not let in.
        num_receivers: how many take part in every push, ranks 0 to num_receivers - 1.
        bucket_bytes: of one half-buffer, a multiple of 64; two of them are the memory that a push takes.
        keep_buffer: keep the buffer, and every receiver's mapping of it, between pushes.
        has_digest: send a checksum with each bucket, which receivers check before they load it.
        is_delta: send only what changed, where every receiver holds the version of the last push.
        deadline_s: how long to wait for anything to move.
        is_debug: overwrite each half-buffer with NaN when everyone has loaded it, so that a kept view is seen.
    """

    run: str = "ebbtide"
    num_receivers: int = 1
    bucket_bytes: int = HOST_BUCKET_BYTES
    keep_buffer: bool = True
    has_digest: bool = False
    is_delta: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S
    is_debug: bool = False

    def __post_init__(self) -> None:
        rules = (
            ("num_receivers", self.num_receivers >= 1, "a push has at least 1 receiver"),
            ("bucket_bytes", self.bucket_bytes > 0 and self.bucket_bytes % ALIGNMENT == 0, "a multiple of 64 above 0"),
            ("deadline_s", self.deadline_s > 0, "must be above 0"),
        )
        broken = [problem(f"weightsync.{name}", getattr(self, name), rule) for name, holds, rule in rules if not holds]
        if broken:
            raise WeightSyncError("\n".join(broken))


@dataclass(slots=True)
class _Push:
    """What one call of `send` is about."""

    version: int
    weights: Iterable[NamedTensor]
    adapter: Adapter | None
    start: float
    filler: Filler | None = None
    plan: Plan | None = None
    is_over: bool = False
    failure: str | None = None
    cause: BaseException | None = None


class SocketSender:
    """Pushes weights to receivers in other processes.

    Args:
        listener: where receivers connect; closed with this object.
        make_buffer: makes a buffer of the given generation; called before the first push and after a failed one.
        options: how to push.
    """

    def __init__(
        self, listener: Listener, make_buffer: Callable[[int], SendBuffer], options: SenderOptions | None = None
    ) -> None:
        self._options = options or SenderOptions()
        self._listener = listener
        self._make_buffer = make_buffer
        self._state = SenderState(
            run=self._options.run,
            num_receivers=self._options.num_receivers,
            keeps_buffer=self._options.keep_buffer,
            token=listener.token,
            pid=os.getpid(),
        )
        self._links: dict[int, Link] = {}
        self._numbers: dict[int, int] = {}  # descriptor -> link
        self._next_number = 0
        self._buffers: dict[int, SendBuffer] = {}
        self._changes = ChangeFilter() if self._options.is_delta else None
        self._wake = Wake()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._worker = Worker("ebbtide-send")
        self._push: _Push | None = None
        self._inbox: deque[SenderEvent] = deque()
        self._expires = 0.0
        self._is_closed = False

    @property
    def address(self) -> str:
        """What receivers connect to; over TCP it contains the secret that lets them in."""
        return self._listener.address

    @property
    def num_live_buffers(self) -> int:
        """Buffers not freed: 1 where kept between pushes, more where a receiver has not let go of an old one."""
        return len(self._buffers)

    async def send(self, weights: Iterable[NamedTensor], version: int) -> PushReport:
        """Push all weights; the event loop stays free, `weights` is iterated in a thread of this object.

        Raises:
            WeightSyncError: a receiver failed, died, was silent beyond the deadline or wants another version, or
                `weights` raised. Receivers whose weights are torn know it; the next push starts anew.
        """
        self._refuse(version)
        self._wake.clear()
        return await self._worker.run(partial(self.send_blocking, weights, version), self.cancel)

    async def send_adapter(self, weights: Iterable[NamedTensor], version: int, adapter: Adapter) -> PushReport:
        """Push a LoRA adapter's weights alone, to receivers that have complete base weights."""
        self._refuse(version)
        self._wake.clear()
        return await self._worker.run(partial(self.send_blocking, weights, version, adapter), self.cancel)

    def send_blocking(self, weights: Iterable[NamedTensor], version: int, adapter: Adapter | None = None) -> PushReport:
        """`send`, or `send_adapter` where an adapter is given, for a plain loop."""
        self._refuse(version)
        push = self._push = _Push(version, weights, adapter, time.monotonic())
        try:
            self._tell(Start(version))
            while not push.is_over:
                self._tell(self._next_event())
            return self._report(push)
        except BaseException:
            if not push.is_over:  # an interrupt in this thread: receivers must not wait for what will not come
                self._tell(Broke("cancelled", "the sender was interrupted"))
            raise
        finally:
            while self._inbox:  # what is left concerns no push, but may concern a link
                self._tell(self._inbox.popleft())
            if push.filler is not None:
                push.filler.close()
            if push.failure is not None and self._changes is not None:
                self._changes.abort()
            self._wake.clear()
            self._push = None

    def cancel(self) -> None:
        """End the push under way, from another thread; its call raises."""
        self._wake.set()

    async def close(self) -> None:
        """Tell every receiver, wait a moment for those that have a buffer mapped, free everything."""
        if not self._is_closed:
            await self._worker.run(self.close_blocking, self.cancel)

    def close_blocking(self) -> None:
        """`close` for a plain loop; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tell(Quit())
        self._expires = time.monotonic() + _FAREWELL_S
        while self._links and time.monotonic() < self._expires:
            for event in self._wait():
                if not isinstance(event, Broke | Expired):
                    self._tell(event)
        if self._links:
            ranks = sorted(link.rank for link in self._state.links.values() if link.rank is not None)
            _LOG.warning("receivers %s still had the push's buffer mapped when the sender closed", ranks)
        for link in self._links.values():
            link.close()
        for generation in list(self._buffers):
            self._free(generation)
        self._links.clear()
        self._listener.close()
        self._wake.close()
        self._worker.close()

    def _refuse(self, version: int) -> None:
        if self._is_closed:
            raise WeightSyncError(problem("push.version", version, "this sender is closed", "Make a new one"))
        if self._push is not None:
            raise WeightSyncError(problem("push.version", version, "another push is under way", "Await it first"))

    def _report(self, push: _Push) -> PushReport:
        if push.failure is not None:
            remedy = "Receivers refuse to generate until a complete push"
            raise WeightSyncError(problem("push.version", push.version, push.failure, remedy)) from push.cause
        assert push.plan is not None
        assert push.filler is not None
        if self._changes is not None and push.adapter is None:
            self._changes.commit(push.version)
        report = PushReport(
            version=push.version,
            num_bytes=push.filler.num_bytes,
            num_tensors=push.filler.num_tensors,
            seconds=time.monotonic() - push.start,
            kind=push.plan.kind,
            digest=self._state.digest,
        )
        _LOG.info("sent %s, digest %s", report, hex_digest(report.digest))
        return report

    # From the machine to the world.

    def _tell(self, event: SenderEvent) -> None:
        events: deque[SenderEvent] = deque([event])
        while events:
            before = self._state.progress
            self._state, actions = sender_step(self._state, events.popleft())
            sends = [action for action in actions if isinstance(action, Send)]
            for send in sends:
                events.extend(self._do(send))
            # Before the next bucket is filled: receivers wait for this one's bytes.
            if self._move(sends):
                for action in actions:
                    if not isinstance(action, Send):
                        events.extend(self._do(action))
            if self._state.progress != before:
                self._expires = time.monotonic() + self._options.deadline_s

    def _do(self, action: SenderAction) -> list[SenderEvent]:
        match action:
            case Send(number, frame, hands_over):
                return self._attempt("plan", partial(self._send, number, frame, hands_over))
            case Drop(number):
                self._drop(number)
            case MakePlan(generation, holds):
                return self._attempt("plan", partial(self._make_plan, generation, holds))
            case Fill(index):
                return self._attempt("weights", partial(self._fill, index))
            case Recycle(index):
                if self._options.is_debug:
                    self._buffers[self._state.generation].poison(index % NUM_HALVES)
            case Free(generation):
                self._free(generation)
            case Finish():
                self._end(None)
            case Fail(text):
                self._end(text)
        return []

    def _move(self, sends: Sequence[Send]) -> bool:
        """What the medium does once a plan or a bucket has been announced to everyone; False where it failed."""
        buffer = self._buffers.get(self._state.generation)
        if buffer is None or not sends:
            return True
        failed: list[SenderEvent] = []
        if any(send.hands_over for send in sends):
            failed = self._attempt("map", buffer.meet)
        elif bucket := next((send.frame for send in sends if isinstance(send.frame, Bucket)), None):
            deliver = partial(buffer.deliver, bucket.index % NUM_HALVES, bucket.num_bytes, self._is_over)
            failed = self._attempt("transfer", deliver)
        if failed:
            self._listen_for_the_cause()
            self._inbox.extend(failed)
        return not failed

    def _is_over(self) -> bool:
        """Whether something has come that ends the push; what came is kept for its turn."""
        self._inbox.extend(self._wait(0.0))
        return any(_is_end(event) for event in self._inbox)

    def _listen_for_the_cause(self) -> None:
        """A transfer that broke says little; the receiver that broke it may say more, in a moment."""
        limit = time.monotonic() + _WORDS_S
        while not self._is_over() and time.monotonic() < limit:
            time.sleep(0.005)

    def _end(self, failure: str | None) -> None:
        assert self._push is not None
        self._push.is_over, self._push.failure = True, failure

    def _attempt(self, kind: str, act: Callable[[], SenderEvent | None]) -> list[SenderEvent]:
        """Do what runs others' code; whatever it raises ends the push on every side."""
        try:
            event = act()
        except Exception as error:  # noqa: BLE001  # raised again, as the cause of the push's error
            if self._push is not None:
                self._push.cause = error
            return [Broke(kind, describe(error))]
        return [] if event is None else [event]

    def _send(self, number: int, frame: Frame, hands_over: bool) -> None:
        link = self._links.get(number)
        if link is None:
            return
        descriptors: tuple[int, ...] = ()
        if hands_over:
            buffer = self._buffers[self._state.generation]
            frame, descriptors = replace(frame, buffer=buffer.export()), buffer.descriptors
        # A peer that is gone is told by the end of its connection, after whatever it said last.
        link.send(frame, descriptors, self._options.deadline_s)

    def _drop(self, number: int) -> None:
        if (link := self._links.pop(number, None)) is not None:
            self._poll.unregister(link)
            del self._numbers[link.fileno()]
            link.close()

    def _free(self, generation: int) -> None:
        """Nothing of a push hangs on it any more, so an error is told and does not end one."""
        if (buffer := self._buffers.pop(generation, None)) is None:
            return
        try:
            buffer.free()
        except Exception as error:  # noqa: BLE001  # the driver's
            _LOG.error("freeing the push's buffer failed: %s", describe(error))

    def _make_plan(self, generation: int, holds: tuple[int | None, ...]) -> SenderEvent:
        push, options = self._push, self._options
        assert push is not None
        if generation not in self._buffers:
            self._buffers[generation] = self._make_buffer(generation)
        kind: Literal["full", "delta", "adapter"] = "full" if push.adapter is None else "adapter"
        weights, base = push.weights, None
        if self._changes is not None and push.adapter is None:
            base = self._changes.base
            if base is not None and all(held == base for held in holds):
                kind = "delta"
            weights = self._changes.select(weights, is_full=kind == "full")
        push.filler = Filler(weights, options.bucket_bytes)
        push.plan = Plan(
            version=push.version,
            kind=kind,
            base=base if kind == "delta" else None,
            bucket_bytes=options.bucket_bytes,
            keeps_buffer=options.keep_buffer,
            has_digest=options.has_digest,
            adapter=push.adapter,
        )
        return Planned(push.plan)

    def _fill(self, index: int) -> SenderEvent:
        push = self._push
        assert push is not None
        assert push.filler is not None
        buffer, half = self._buffers[self._state.generation], index % NUM_HALVES
        entries, num_bytes, is_last = push.filler.fill(partial(buffer.write, half))
        buffer.synchronize()
        digest = bucket_digest(buffer.payload(half, num_bytes), entries) if self._options.has_digest else None
        return Filled(Bucket(index, entries, num_bytes, is_last, digest))

    # From the world to the machine.

    def _next_event(self) -> SenderEvent:
        while not self._inbox:
            self._inbox.extend(self._wait())
        return self._inbox.popleft()

    def _wait(self, at_most_s: float = math.inf) -> list[SenderEvent]:
        remaining = min(at_most_s, self._expires - time.monotonic())
        ready = self._poll.poll(max(0.0, remaining * 1000))
        if not ready:
            return [Expired()] if time.monotonic() >= self._expires else []
        events: list[SenderEvent] = []
        for fd, _ in ready:
            if fd == self._wake.fileno():
                self._wake.clear()
                events.append(Broke("cancelled", "its caller left"))
            elif fd == self._listener.fileno():
                events += self._accept()
            elif fd in self._numbers:
                events += self._read(self._numbers[fd])
        return events

    def _accept(self) -> list[SenderEvent]:
        link = self._listener.accept()
        if link is None:
            return []
        number, self._next_number = self._next_number, self._next_number + 1
        self._links[number], self._numbers[link.fileno()] = link, number
        self._poll.register(link, select.POLLIN)
        return [Connected(number)]

    def _read(self, number: int) -> list[SenderEvent]:
        link = self._links[number]
        items: list[Incoming] = []
        while (found := link.receive()) and len(items) < _MAX_READ:
            items += found
            if items[-1] is None:
                break
        for fd in link.take_descriptors():  # no receiver has any to give
            os.close(fd)
        is_outside = self._state.links[number].phase in (LinkPhase.NEW, LinkPhase.IDLE)
        if items and items[-1] is None and is_outside:  # what it said before it left is about a push that is past
            return [Died(number, link.is_peer_dead())]
        return [_event(number, item) for item in items]


def _is_end(event: SenderEvent) -> bool:
    return not isinstance(event, Arrived | Connected) or (
        isinstance(event, Arrived) and isinstance(event.frame, Failed)
    )


def _event(number: int, item: Incoming) -> SenderEvent:
    if item is None:
        return Died(number)
    if isinstance(item, MalformedFrameError):
        return Malformed(number, str(item))
    return Arrived(number, item)
