"""The receiver's machine: what it acknowledges it has let go of, and torn weights stay torn until a complete push."""

from collections.abc import Callable
from enum import Enum, auto
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from ebbtide.weightsync.digests import chain
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
from ebbtide.weightsync.messages import (
    PROTOCOL,
    Bucket,
    Close,
    Closed,
    Commit,
    Failed,
    Frame,
    Hello,
    Loaded,
    Plan,
    Ready,
    Released,
)

__all__ = ["ReceiverAction", "ReceiverEvent", "ReceiverPhase", "ReceiverState", "receiver_step"]

_LINK = 0
_MAX_TEXT = 8000


class ReceiverPhase(Enum):
    """Where the receiver stands."""

    IDLE = auto()  # outside a push, connected or not
    WAITING = auto()  # for the plan
    MAPPING = auto()  # the shell maps the buffer
    LISTENING = auto()  # for the next bucket
    LOADING = auto()  # the shell loads a bucket
    RELEASED = auto()  # everything is loaded and let go; waits for the commit
    COMMITTED = auto()  # the version counts; waits for Close
    CLOSING = auto()  # the shell closes the mapping as the sender asked
    FAILING = auto()  # the shell closes the mapping after a failure
    QUITTING = auto()  # the shell closes the mapping as its own side asked


class ReceiverState(msgspec.Struct, frozen=True):
    """The receiver.

    Attributes:
        run, rank, token, pid: for the greeting.
        phase, version: the push under way.
        holds: the version of the weights; None where they are torn or unknown: nothing may be generated from them.
        is_connected: the link has carried our greeting.
        is_greeted: the link has carried the sender's.
        is_mapped: the buffer is mapped.
        plan: of this push.
        num_loaded: buckets loaded and let go.
        is_last_loaded: the last of them, too.
        digest: over the buckets loaded so far.
        failure: what the call will raise once the mapping is closed.
        progress: grows with every step forward; the deadline counts from its last change.
    """

    run: str
    rank: int
    token: str = ""
    pid: int = 0
    phase: ReceiverPhase = ReceiverPhase.IDLE
    version: int = -1
    holds: int | None = None
    is_connected: bool = False
    is_greeted: bool = False
    is_mapped: bool = False
    plan: Plan | None = None
    num_loaded: int = 0
    is_last_loaded: bool = False
    digest: int | None = None
    failure: str = ""
    progress: int = 0


ReceiverEvent: TypeAlias = Start | Arrived | Malformed | Died | Expired | Broke | Mapped | Dropped | Unmapped | Quit
ReceiverAction: TypeAlias = Send | Drop | Finish | Fail | MapBuffer | LoadBucket | Unmap | Strand
_Step: TypeAlias = tuple[ReceiverState, list[ReceiverAction]]


def receiver_step(state: ReceiverState, event: ReceiverEvent) -> _Step:
    """What the receiver does about one event."""
    match event:
        case Start(version):
            return _start(state, version)
        case Arrived(_, frame):
            return _on_frame(state, frame)
        case Malformed(_, text):
            return _fail(state, "protocol", f"the sender sent what is no frame: {text}")
        case Died(_):
            return _fail(state, "died", "the sender died, or closed its connection", is_told=False)
        case Broke(kind, text):
            return _fail(state, kind, text)
        case Expired():
            waited = state.phase.name.lower()
            return _fail(state, "deadline", f"the sender was silent for the whole deadline ({waited})")
        case Mapped():
            return replace(state, phase=ReceiverPhase.LISTENING, is_mapped=True), []
        case Dropped(index):
            return _on_dropped(state, index)
        case Unmapped(is_closed):
            return _on_unmapped(state, is_closed)
        case Quit():
            return _quit(state)


def _start(state: ReceiverState, version: int) -> _Step:
    assert state.phase is ReceiverPhase.IDLE, state.phase
    hello = Hello(PROTOCOL, state.run, state.rank, state.pid, state.token)
    actions: list[ReceiverAction] = [] if state.is_connected else [Send(_LINK, hello)]
    actions.append(Send(_LINK, Ready(version, state.holds)))
    state = replace(
        state,
        phase=ReceiverPhase.WAITING,
        version=version,
        is_connected=True,
        plan=None,
        num_loaded=0,
        is_last_loaded=False,
        digest=None,
        failure="",
        progress=state.progress + 1,
    )
    return state, actions


def _on_frame(state: ReceiverState, frame: Frame) -> _Step:
    if state.phase is ReceiverPhase.IDLE:  # news of a push that we had no part in: the connection is worth nothing
        return _fail(state, "", "", is_told=False)
    if isinstance(frame, Failed):
        return _fail(state, frame.kind, frame.text, is_told=False)
    handler = _HANDLERS.get((state.phase, type(frame)))
    if handler is None:
        told = f"the sender sent {type(frame).__name__} while the receiver was {state.phase.name.lower()}"
        return _fail(state, "protocol", told)
    return handler(replace(state, progress=state.progress + 1), frame)


def _on_hello(state: ReceiverState, frame: Hello) -> _Step:
    if frame.protocol != PROTOCOL:
        return _fail(state, "protocol", f"the sender speaks protocol {frame.protocol}, this side {PROTOCOL}")
    if frame.run != state.run:
        return _fail(state, "run", f"the sender belongs to run {frame.run!r}, this side to {state.run!r}")
    return replace(state, is_greeted=True), []


def _on_plan(state: ReceiverState, plan: Plan) -> _Step:
    if wrong := _what_is_wrong(state, plan):
        return _fail(state, "plan", wrong)
    state = replace(state, plan=plan)
    if plan.buffer is None:
        return replace(state, phase=ReceiverPhase.LISTENING), []
    return replace(state, phase=ReceiverPhase.MAPPING), [MapBuffer(plan)]


def _what_is_wrong(state: ReceiverState, plan: Plan) -> str:
    if not state.is_greeted:
        return "the plan came before the sender's greeting"
    if plan.version != state.version:
        return f"the plan is for version {plan.version}, this side waits for {state.version}"
    if plan.kind == "delta" and (state.holds is None or plan.base != state.holds):
        return f"the changes are against version {plan.base}, this side holds {state.holds}"
    if plan.kind == "adapter" and (state.holds is None or plan.adapter is None):
        return "an adapter came, and this side has no complete weights to put it on"
    if (plan.buffer is None) != state.is_mapped:
        return f"the buffer is {'not ' if not state.is_mapped else ''}mapped, the sender thinks otherwise"
    return ""


def _on_bucket(state: ReceiverState, bucket: Bucket) -> _Step:
    assert state.plan is not None
    if bucket.index != state.num_loaded or state.is_last_loaded:
        return _fail(state, "protocol", f"bucket {bucket.index} came where {state.num_loaded} was due")
    if (bucket.digest is None) == state.plan.has_digest:
        return _fail(state, "protocol", f"bucket {bucket.index} and the plan disagree about digests")
    # From here on the weights may be a mixture of two versions. An adapter is put on whole, after its last bucket.
    is_torn = state.plan.kind != "adapter" or bucket.is_last
    holds = None if is_torn else state.holds
    digest = chain(state.digest, bucket.digest)
    state = replace(state, phase=ReceiverPhase.LOADING, holds=holds, digest=digest, is_last_loaded=bucket.is_last)
    return state, [LoadBucket(bucket)]


def _on_dropped(state: ReceiverState, index: int) -> _Step:
    assert state.phase is ReceiverPhase.LOADING, state.phase
    assert index == state.num_loaded, (index, state.num_loaded)
    state = replace(state, phase=ReceiverPhase.LISTENING, num_loaded=index + 1)
    actions: list[ReceiverAction] = [Send(_LINK, Loaded(index))]
    if state.is_last_loaded:
        state = replace(state, phase=ReceiverPhase.RELEASED)
        actions.append(Send(_LINK, Released(state.version, state.digest)))
    return state, actions


def _on_commit(state: ReceiverState, frame: Commit) -> _Step:
    plan = state.plan
    assert plan is not None
    if frame.version != state.version:
        return _fail(state, "protocol", f"version {frame.version} was committed, {state.version} was loaded")
    state = replace(state, holds=state.version)
    if plan.keeps_buffer:
        return replace(state, phase=ReceiverPhase.IDLE), [Finish()]
    return replace(state, phase=ReceiverPhase.COMMITTED), []


def _on_close(state: ReceiverState, _frame: Close) -> _Step:
    return replace(state, phase=ReceiverPhase.CLOSING), [Unmap()]


_HANDLERS: dict[tuple[ReceiverPhase, type], Callable[..., _Step]] = {
    (ReceiverPhase.WAITING, Hello): _on_hello,
    (ReceiverPhase.WAITING, Plan): _on_plan,
    (ReceiverPhase.LISTENING, Bucket): _on_bucket,
    (ReceiverPhase.RELEASED, Commit): _on_commit,
    (ReceiverPhase.COMMITTED, Close): _on_close,
}


def _on_unmapped(state: ReceiverState, is_closed: bool) -> _Step:
    """The mapping is closed, or stays open because the consumer keeps views of it."""
    if not is_closed:
        text = state.failure or "the mapping cannot be closed: views of it are alive"
        actions: list[ReceiverAction] = [Strand()]
        if state.phase is ReceiverPhase.CLOSING:
            actions.insert(0, Send(_LINK, Failed("release", text)))
        return _offline(state), [*actions, *_told(state, text)]
    if state.phase is ReceiverPhase.CLOSING:
        return replace(state, phase=ReceiverPhase.IDLE, is_mapped=False), [Send(_LINK, Closed()), Finish()]
    return _offline(state), [Drop(_LINK), *_told(state, state.failure)]


def _fail(state: ReceiverState, kind: str, text: str, *, is_told: bool = True) -> _Step:
    """End the push, or a connection that went bad between pushes: tell the sender, close the mapping, hang up."""
    if state.phase in (ReceiverPhase.FAILING, ReceiverPhase.QUITTING):
        return state, []
    is_idle = state.phase is ReceiverPhase.IDLE
    if is_idle and not state.is_connected:
        return state, []
    actions: list[ReceiverAction] = [Send(_LINK, Failed(kind, text[:_MAX_TEXT]))] if is_told and not is_idle else []
    if state.is_mapped or state.phase is ReceiverPhase.MAPPING:
        phase = ReceiverPhase.QUITTING if is_idle else ReceiverPhase.FAILING
        return replace(state, phase=phase, failure=text), [*actions, Unmap()]
    actions += [Drop(_LINK)]
    return _offline(state), actions if is_idle else [*actions, Fail(text)]


def _told(state: ReceiverState, text: str) -> list[ReceiverAction]:
    return [] if state.phase is ReceiverPhase.QUITTING else [Fail(text)]


def _quit(state: ReceiverState) -> _Step:
    assert state.phase is ReceiverPhase.IDLE, state.phase
    if not state.is_connected:
        return state, []
    if state.is_mapped:
        return replace(state, phase=ReceiverPhase.QUITTING), [Unmap()]
    return _offline(state), [Drop(_LINK)]


def _offline(state: ReceiverState) -> ReceiverState:
    return replace(state, phase=ReceiverPhase.IDLE, is_connected=False, is_greeted=False, is_mapped=False, plan=None)
