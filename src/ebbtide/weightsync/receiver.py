"""The receiver's shell: carries out what its machine decides, over one connection and the buffer it is offered.

Blocking at heart, so that a worker process without an event loop can use it: `receive_blocking` loads in the calling
thread. `receive` does the same in a thread of its own.
"""

import logging
import os
import select
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ebbtide.errors import WeightSyncError, problem
from ebbtide.weightsync.base import DEFAULT_DEADLINE_S, Load, NamedTensor
from ebbtide.weightsync.buckets import DTYPES, Assembler
from ebbtide.weightsync.digests import bucket_digest, hex_digest
from ebbtide.weightsync.link import Link, connect, tidy_up_after, token_of
from ebbtide.weightsync.machine.events import (
    Arrived,
    Broke,
    Died,
    Drop,
    Dropped,
    Expired,
    Fail,
    Finish,
    LoadBucket,
    Malformed,
    MapBuffer,
    Mapped,
    Quit,
    Send,
    Start,
    Strand,
    Unmap,
    Unmapped,
)
from ebbtide.weightsync.machine.receiver import ReceiverAction, ReceiverEvent, ReceiverState, receiver_step
from ebbtide.weightsync.machine.sender_state import NUM_HALVES
from ebbtide.weightsync.media import open_mapping
from ebbtide.weightsync.medium import Mapping
from ebbtide.weightsync.messages import Adapter, Bucket, Failed, MalformedFrameError, Plan
from ebbtide.weightsync.worker import Wake, Worker, describe

__all__ = ["LoadAdapter", "SocketReceiver"]

_LOG = logging.getLogger("ebbtide.weightsync")
_WORDS_S = 0.5

LoadAdapter = Callable[[Adapter, Sequence[NamedTensor]], None]
"""Takes a whole LoRA adapter in one call; the tensors are the consumer's own."""


@dataclass(slots=True)
class _Push:
    """What one call of `receive` is about."""

    version: int
    load: Load
    load_adapter: LoadAdapter | None
    assembler: Assembler | None = None
    adapter_weights: list[NamedTensor] | None = None
    is_over: bool = False
    failure: str | None = None
    cause: BaseException | None = None


class SocketReceiver:
    """Takes pushes from a sender in another process.

    Args:
        address: the sender's.
        rank: which of the sender's receivers this is.
        run: the sender's.
        holds: the version of the weights that the consumer has; None where it has none that are complete.
        deadline_s: how long to wait for anything to move.
        open_buffer: makes the mapping of a plan's buffer, for media of one's own.
    """

    def __init__(
        self,
        address: str,
        rank: int = 0,
        *,
        run: str = "ebbtide",
        holds: int | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        open_buffer: Callable[[Plan, int, Sequence[int], float], Mapping] = open_mapping,
    ) -> None:
        self._address = address
        self._deadline_s = deadline_s
        self._open_buffer = open_buffer
        self._state = ReceiverState(run=run, rank=rank, token=token_of(address), pid=os.getpid(), holds=holds)
        self._link: Link | None = None
        self._mapping: Mapping | None = None
        self._stranded: list[tuple[Mapping, Link]] = []
        self._inbox: deque[ReceiverEvent] = deque()
        self._wake = Wake()
        self._worker = Worker(f"ebbtide-receive-{rank}")
        self._push: _Push | None = None
        self._expires = 0.0
        self._is_closed = False

    @property
    def holds(self) -> int | None:
        """The version of the weights; None where a push broke off and they are torn, or they were never complete."""
        return self._state.holds

    async def receive(self, load: Load, version: int, load_adapter: LoadAdapter | None = None) -> None:
        """Take one push of exactly this version; `load` runs in a thread of this object.

        Raises:
            WeightSyncError: the sender failed, died, was silent beyond the deadline or brings another version, or
                `load` raised or kept a view. `holds` tells whether the weights are torn.
        """
        self._refuse(version)
        self._wake.clear()
        call = partial(self.receive_blocking, load, version, load_adapter)
        await self._worker.run(call, self.cancel)

    def receive_blocking(self, load: Load, version: int, load_adapter: LoadAdapter | None = None) -> None:
        """`receive` for a plain loop; `load` runs in the calling thread."""
        rank = self._state.rank
        self._refuse(version)
        self._stranded = [pair for pair in self._stranded if not _let_go(*pair)]
        self._connect()
        push = self._push = _Push(version, load, load_adapter)
        try:
            self._tell(Start(version))
            while not push.is_over:
                self._tell(self._next_event())
        except BaseException:
            if not push.is_over:  # an interrupt in this thread: the sender must not wait for what will not come
                self._tell(Broke("cancelled", "the receiver was interrupted"))
            raise
        finally:
            self._wake.clear()
            self._push = None
        if push.failure is not None:
            raise WeightSyncError(problem(f"receiver[{rank}].version", version, push.failure)) from push.cause
        _LOG.info("received version %d as rank %d, digest %s", version, rank, hex_digest(self._state.digest))

    def cancel(self) -> None:
        """End the push under way, from another thread; a `load` that runs is not interrupted."""
        self._wake.set()

    async def close(self) -> None:
        """Close the mapping and hang up."""
        if not self._is_closed:
            await self._worker.run(self.close_blocking, self.cancel)

    def close_blocking(self) -> None:
        """`close` for a plain loop; calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tell(Quit())
        for mapping, link in self._stranded:
            if not _let_go(mapping, link):
                link.close()
        self._stranded.clear()
        self._wake.close()
        self._worker.close()

    def _refuse(self, version: int) -> None:
        where = f"receiver[{self._state.rank}].version"
        if self._is_closed:
            raise WeightSyncError(problem(where, version, "this receiver is closed", "Make a new one"))
        if self._push is not None:
            raise WeightSyncError(problem(where, version, "another push is under way", "Await it first"))

    def _connect(self) -> None:
        """Have a connection that no news of a broken push waits on."""
        if self._link is not None:
            self._read()
            while self._inbox and self._link is not None:
                self._tell(self._inbox.popleft())
        self._inbox.clear()
        if self._link is None:
            self._link = connect(self._address, self._deadline_s)

    # From the machine to the world.

    def _tell(self, event: ReceiverEvent) -> None:
        events: deque[ReceiverEvent] = deque([event])
        while events:
            before = self._state.progress
            self._state, actions = receiver_step(self._state, events.popleft())
            for action in actions:
                events.extend(self._do(action))
            if self._state.progress != before:
                self._expires = time.monotonic() + self._deadline_s

    def _do(self, action: ReceiverAction) -> list[ReceiverEvent]:
        match action:
            case Send(_, frame):
                # A peer that is gone is told by the end of the connection, after whatever it said last.
                if self._link is not None:
                    self._link.send(frame, (), self._deadline_s)
            case Drop(_):
                self._hang_up()
            case MapBuffer(plan):
                return self._attempt("map", partial(self._map, plan))
            case LoadBucket(bucket):
                return self._load(bucket)
            case Unmap():
                return [self._unmap()]
            case Strand():
                assert self._mapping is not None
                assert self._link is not None
                self._stranded.append((self._mapping, self._link))
                self._mapping, self._link = None, None
            case Finish():
                self._end(None)
            case Fail(text):
                self._end(text)
        return []

    def _end(self, failure: str | None) -> None:
        assert self._push is not None
        self._push.is_over, self._push.failure = True, failure

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            tidy_up_after(self._address)
        self._link = None
        self._inbox.clear()

    def _attempt(self, kind: str, act: Callable[[], ReceiverEvent | None]) -> list[ReceiverEvent]:
        """Do what may run others' code; whatever it raises ends the push on every side.

        The frames that the error passed through hold the views that it was working on, so they are emptied.
        """
        try:
            event = act()
        except Exception as error:  # noqa: BLE001  # raised again, as the cause of the push's error
            _empty_frames(error)
            if self._push is not None:
                self._push.cause = error
            return [Broke(kind, describe(error))]
        return [] if event is None else [event]

    def _map(self, plan: Plan) -> ReceiverEvent:
        assert self._link is not None
        assert self._push is not None
        self._mapping = self._open_buffer(plan, self._state.rank, self._link.take_descriptors(), self._deadline_s)
        return Mapped()

    def _load(self, bucket: Bucket) -> list[ReceiverEvent]:
        """Check, load, synchronise, see that nothing is kept: each with its own name where it fails."""
        steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("protocol", partial(self._check, bucket)),
            ("transfer", partial(self._collect, bucket)),
            ("load", partial(self._load_entries, bucket)),
            ("synchronize", self._synchronize),
            ("release", self._see_that_nothing_is_kept),
        )
        for kind, step in steps:
            if failed := self._attempt(kind, step):
                return self._words_of_the_sender() or failed if kind == "transfer" else failed
        return [Dropped(bucket.index)]

    def _check(self, bucket: Bucket) -> None:
        push, plan = self._push, self._state.plan
        assert push is not None
        assert plan is not None
        if push.assembler is None:
            push.assembler = Assembler(self._consumer(push, plan), plan.bucket_bytes)
        push.assembler.check(bucket)

    def _collect(self, bucket: Bucket) -> None:
        mapping, half = self._mapping, bucket.index % NUM_HALVES
        assert mapping is not None
        mapping.collect(half, bucket.num_bytes, self._is_over)
        if bucket.digest is not None:
            found = bucket_digest(mapping.payload(half, bucket.num_bytes), bucket.entries)
            if found != bucket.digest:
                rule = f"arrived with digest {hex_digest(found)}, sent with {hex_digest(bucket.digest)}"
                raise WeightSyncError(problem("bucket", bucket.index, rule))

    def _consumer(self, push: _Push, plan: Plan) -> Load:
        if plan.adapter is None:
            return push.load
        if push.load_adapter is None:
            raise WeightSyncError(problem("plan.adapter", plan.adapter.name, "this receiver takes no adapters"))
        push.adapter_weights = []
        return partial(_collect_copies, push.adapter_weights)

    def _load_entries(self, bucket: Bucket) -> None:
        push, mapping, plan = self._push, self._mapping, self._state.plan
        assert push is not None
        assert push.assembler is not None
        assert mapping is not None
        assert plan is not None
        half = bucket.index % NUM_HALVES
        with torch.no_grad():
            push.assembler.take(bucket.entries, lambda entry: mapping.view(half, entry, DTYPES[entry.dtype]))
            if bucket.is_last and plan.adapter is not None and push.load_adapter is not None:
                push.load_adapter(plan.adapter, push.adapter_weights or [])

    def _synchronize(self) -> None:
        assert self._mapping is not None
        self._mapping.synchronize()

    def _see_that_nothing_is_kept(self) -> None:
        assert self._mapping is not None
        if kept := self._mapping.kept():
            shown = ", ".join(repr(name) for name in kept[:4])
            rule = f"load returned and kept views of {shown}"
            raise WeightSyncError(problem("views", len(kept), rule, "Copy what is to be kept"))

    def _unmap(self) -> ReceiverEvent:
        if self._push is not None:
            self._push.assembler = None
        if self._mapping is None:
            return Unmapped(is_closed=True)
        try:
            is_closed = self._mapping.close()
        except Exception as error:  # noqa: BLE001  # the driver's; a mapping that may be open counts as open
            _LOG.error("closing the push's mapping failed: %s", describe(error))
            is_closed = False
        if is_closed:
            self._mapping = None
        return Unmapped(is_closed)

    # From the world to the machine.

    def _next_event(self) -> ReceiverEvent:
        while not self._inbox:
            assert self._link is not None
            poll = select.poll()
            poll.register(self._link, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            remaining = self._expires - time.monotonic()
            ready = [fd for fd, _ in poll.poll(max(0.0, remaining * 1000))]
            if self._wake.fileno() in ready:
                self._wake.clear()
                return Broke("cancelled", "the receiver's caller left")
            if ready:
                self._read()
            elif time.monotonic() >= self._expires:
                return Expired()
        return self._inbox.popleft()

    def _is_over(self) -> bool:
        """Whether the sender has said, or its end says, that the push is over; frames read on the way are kept."""
        self._read()
        return self._wake_is_set() or any(_is_end(event) for event in self._inbox)

    def _wake_is_set(self) -> bool:
        return bool(select.select([self._wake], [], [], 0)[0])

    def _words_of_the_sender(self) -> list[ReceiverEvent]:
        """A transfer that broke says little; the sender may know which rank it was, and says so in a moment."""
        limit = time.monotonic() + _WORDS_S
        while not self._is_over() and time.monotonic() < limit:
            time.sleep(0.005)
        ends = [event for event in self._inbox if _is_end(event)]
        return ends[:1]

    def _read(self) -> None:
        assert self._link is not None
        for item in self._link.receive():
            if item is None:
                self._inbox.append(Died(0))
            elif isinstance(item, MalformedFrameError):
                self._inbox.append(Malformed(0, str(item)))
            else:
                self._inbox.append(Arrived(0, item))


def _is_end(event: ReceiverEvent) -> bool:
    return not isinstance(event, Arrived) or isinstance(event.frame, Failed)


def _empty_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _let_go(mapping: Mapping, link: Link) -> bool:
    """Close a mapping that was set aside, and then its link, which tells the sender."""
    if mapping.close():
        link.close()
        return True
    return False


def _collect_copies(kept: list[NamedTensor], weights: Sequence[NamedTensor]) -> None:
    kept.extend((name, tensor.clone()) for name, tensor in weights)
