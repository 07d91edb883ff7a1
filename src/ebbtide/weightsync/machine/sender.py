"""The sender's machine: one push to all receivers; no half-buffer is reused or freed while anyone reads it."""

from collections.abc import Callable
from hmac import compare_digest
from typing import TypeAlias

from msgspec.structs import replace

from ebbtide.weightsync.digests import chain
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
from ebbtide.weightsync.machine.sender_state import NUM_HALVES, Link, LinkPhase, SenderPhase, SenderState
from ebbtide.weightsync.messages import (
    PROTOCOL,
    SENDER_RANK,
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

__all__ = ["SenderAction", "SenderEvent", "sender_step"]

_MAX_REFUSALS = 4
_MAX_TEXT = 8000


SenderEvent: TypeAlias = Start | Connected | Arrived | Malformed | Died | Expired | Broke | Planned | Filled | Quit
SenderAction: TypeAlias = Send | Drop | Finish | Fail | MakePlan | Fill | Recycle | Free
_Step: TypeAlias = tuple[SenderState, list[SenderAction]]


def sender_step(state: SenderState, event: SenderEvent) -> _Step:
    """What the sender does about one event; events of links that are gone do nothing."""
    match event:
        case Start(version):
            return _start(state, version)
        case Connected(link):
            hello = Hello(PROTOCOL, state.run, SENDER_RANK, state.pid)
            return state.with_link(link, Link()), [Send(link, hello)]
        case Arrived(link, frame):
            return _on_frame(state, link, frame)
        case Malformed(link, text):
            return _on_malformed(state, link, text)
        case Died(link, is_dead):
            return _on_death(state, link, is_dead)
        case Planned(plan):
            return _on_planned(state, plan)
        case Filled(bucket):
            return _on_filled(state, bucket)
        case Broke(kind, text):
            return _fail(state, kind, f"the sender failed in {kind}: {text}") if state.is_busy else (state, [])
        case Expired():
            return _fail(state, "deadline", state.awaited()) if state.is_busy else (state, [])
        case Quit():
            return _quit(state)


def _start(state: SenderState, version: int) -> _Step:
    assert state.phase is SenderPhase.IDLE, state.phase
    state = replace(
        state,
        phase=SenderPhase.GATHERING,
        version=version,
        num_sent=0,
        is_filling=False,
        is_last_sent=False,
        digest=None,
        refusals=(),
        progress=state.progress + 1,
    )
    for number, link in state.links.items():
        if link.phase is LinkPhase.READY and link.wanted != version:
            return _fail(state, "version", _wants_another(state, link), number)
    return _plan_if_complete(state)


# Frames, by where their link stands.


def _on_frame(state: SenderState, number: int, frame: Frame) -> _Step:
    link = state.links.get(number)
    if link is None:
        return state, []
    if link.phase is LinkPhase.LEAVING:
        return _on_death(state, number) if isinstance(frame, Closed) else (state, [])
    if link.phase is LinkPhase.NEW:
        return _on_greeting(state, number, frame)
    if isinstance(frame, Failed):
        state = state.with_link(number, replace(link, phase=LinkPhase.LEAVING))
        missing = f"; {state.awaited()}" if state.phase is SenderPhase.GATHERING else ""
        text = f"receiver {link.rank} failed in {frame.kind}: {frame.text}{missing}"
        return _fail(state, frame.kind, text, number) if state.is_busy else _leave(state, [number])
    handler = _HANDLERS.get((link.phase, type(frame)))
    if handler is None:
        return _unexpected(state, number, f"sent {type(frame).__name__} while {link.phase.name.lower()}")
    return handler(state, number, link, frame)


def _on_greeting(state: SenderState, number: int, frame: Frame) -> _Step:
    if not isinstance(frame, Hello):
        return _refuse(state, number, "protocol", f"the first frame must be Hello, not {type(frame).__name__}")
    if frame.protocol != PROTOCOL:
        return _refuse(state, number, "protocol", f"rank {frame.rank} speaks protocol {frame.protocol}, not {PROTOCOL}")
    if frame.run != state.run or not compare_digest(frame.token.encode(), state.token.encode()):
        return _refuse(state, number, "run", f"rank {frame.rank} belongs to run {frame.run!r}, this is {state.run!r}")
    if not 0 <= frame.rank < state.num_receivers:
        return _refuse(state, number, "rank", f"rank {frame.rank} of {state.num_receivers} receivers")
    actions: list[SenderAction] = []
    for other, link in state.links.items():
        if link.rank != frame.rank or link.phase is LinkPhase.LEAVING:
            continue
        if link.phase in (LinkPhase.LOADING, LinkPhase.RELEASED):
            return _refuse(state, number, "rank", f"rank {frame.rank} is in the middle of a push already")
        state, actions = _leave(state, [other], Failed("rank", f"another receiver of rank {frame.rank} has come"))
    return state.with_link(number, Link(LinkPhase.IDLE, frame.rank)), actions


def _on_ready(state: SenderState, number: int, link: Link, frame: Ready) -> _Step:
    link = replace(link, phase=LinkPhase.READY, wanted=frame.version, holds=frame.holds)
    state = state.with_link(number, link)
    if state.phase is not SenderPhase.GATHERING:
        return state, []  # early for the next push
    state = replace(state, progress=state.progress + 1)
    if frame.version != state.version:
        return _fail(state, "version", _wants_another(state, link), number)
    return _plan_if_complete(state)


def _on_loaded(state: SenderState, number: int, link: Link, frame: Loaded) -> _Step:
    if frame.index != link.num_loaded or frame.index >= state.num_sent:
        return _unexpected(state, number, f"acknowledged bucket {frame.index} out of turn")
    before = state.num_loaded_by_all
    state = state.with_link(number, replace(link, num_loaded=link.num_loaded + 1))
    state = replace(state, progress=state.progress + 1)
    actions: list[SenderAction] = [Recycle(index) for index in range(before, state.num_loaded_by_all)]
    return _fill_if_free(state, actions)


def _on_released(state: SenderState, number: int, link: Link, frame: Released) -> _Step:
    if not state.is_last_sent or link.num_loaded < state.num_sent or frame.version != state.version:
        return _unexpected(state, number, f"released version {frame.version} out of turn")
    if frame.digest != state.digest:
        text = f"receiver {link.rank} has digest {frame.digest}, the sender {state.digest}"
        return _fail(state, "digest", text)
    state = state.with_link(number, replace(link, phase=LinkPhase.RELEASED))
    state = replace(state, progress=state.progress + 1)
    members = state.members(LinkPhase.RELEASED)
    if len(members) < state.num_receivers:
        return state, []
    actions: list[SenderAction] = [Send(member, Commit(state.version)) for member in members]
    if state.keeps_buffer:
        for member in members:
            held = replace(state.links[member], phase=LinkPhase.IDLE, holds=state.version)
            state = state.with_link(member, held)
        return replace(state, phase=SenderPhase.IDLE), [*actions, Finish()]
    return replace(state, phase=SenderPhase.CLOSING), [*actions, *(Send(member, Close()) for member in members)]


def _on_closed(state: SenderState, number: int, link: Link, _frame: Closed) -> _Step:
    if state.phase is not SenderPhase.CLOSING:
        return _unexpected(state, number, "sent Closed before Close")
    link = replace(link, phase=LinkPhase.IDLE, holds=state.version, maps=None)
    state = replace(state.with_link(number, link), progress=state.progress + 1)
    if state.members(LinkPhase.RELEASED):
        return state, []
    state, actions = _retire_buffer(state)
    return replace(state, phase=SenderPhase.IDLE), [*actions, Finish()]


_HANDLERS: dict[tuple[LinkPhase, type], Callable[..., _Step]] = {
    (LinkPhase.IDLE, Ready): _on_ready,
    (LinkPhase.LOADING, Loaded): _on_loaded,
    (LinkPhase.LOADING, Released): _on_released,
    (LinkPhase.RELEASED, Closed): _on_closed,
}


# The shell's own reports.


def _on_planned(state: SenderState, plan: Plan) -> _Step:
    if state.phase is not SenderPhase.PLANNING:
        return state, []
    state = replace(state, phase=SenderPhase.PUSHING, progress=state.progress + 1)
    actions: list[SenderAction] = []
    for number in state.members(LinkPhase.READY):
        link = state.links[number]
        actions.append(Send(number, plan, hands_over=link.maps != state.generation))
        state = state.with_link(number, replace(link, phase=LinkPhase.LOADING, num_loaded=0, maps=state.generation))
    return _fill_if_free(state, actions)


def _on_filled(state: SenderState, bucket: Bucket) -> _Step:
    if state.phase is not SenderPhase.PUSHING:
        return state, []
    assert bucket.index == state.num_sent, (bucket.index, state.num_sent)
    state = replace(
        state,
        num_sent=state.num_sent + 1,
        is_filling=False,
        is_last_sent=bucket.is_last,
        digest=chain(state.digest, bucket.digest),
        progress=state.progress + 1,
    )
    return _fill_if_free(state, [Send(number, bucket) for number in state.members(LinkPhase.LOADING)])


def _fill_if_free(state: SenderState, actions: list[SenderAction]) -> _Step:
    """Ask for the next bucket where its half-buffer is free: every receiver has loaded the one that was in it."""
    is_free = state.num_sent - state.num_loaded_by_all < NUM_HALVES
    if state.is_last_sent or state.is_filling or not is_free:
        return state, actions
    return replace(state, is_filling=True), [*actions, Fill(state.num_sent)]


def _plan_if_complete(state: SenderState) -> _Step:
    ready = {state.links[number].rank: state.links[number] for number in state.members(LinkPhase.READY)}
    if len(ready) < state.num_receivers:
        return state, []
    holds = tuple(ready[rank].holds for rank in range(state.num_receivers))
    return replace(state, phase=SenderPhase.PLANNING, has_buffer=True), [MakePlan(state.generation, holds)]


# Ends.


def _on_malformed(state: SenderState, number: int, text: str) -> _Step:
    link = state.links.get(number)
    if link is None or link.phase is LinkPhase.LEAVING:
        return state, []
    if link.phase is LinkPhase.NEW:
        return _refuse(state, number, "protocol", text)
    return _unexpected(state, number, f"sent what is no frame: {text}")


def _on_death(state: SenderState, number: int, is_dead: bool = False) -> _Step:
    """The link is gone, and with it the peer's mapping."""
    link = state.links.get(number)
    if link is None:
        return state, []
    state = state.without_link(number)
    actions: list[SenderAction] = [Drop(number), *_free_if_unmapped(state, link.maps)]
    in_push = link.phase in (LinkPhase.LOADING, LinkPhase.RELEASED)
    # One that only hung up before it was ready may come back, and so may one whose successor is connecting.
    is_lost = is_dead and link.phase is LinkPhase.IDLE and not state.members(LinkPhase.NEW)
    is_missed = is_lost and state.phase is SenderPhase.GATHERING and not state.has_rank(link.rank)
    if in_push or is_missed or (link.phase is LinkPhase.READY and state.is_busy):
        text = f"receiver {link.rank} died, or closed its connection"
        state, more = _fail(state, "died", text)
        return state, [*actions, *more]
    return state, actions


def _unexpected(state: SenderState, number: int, text: str) -> _Step:
    """A greeted receiver broke the protocol; without a push under way it alone is sent off."""
    told = f"receiver {state.links[number].rank} {text}"
    if state.is_busy:
        return _fail(state, "protocol", told)
    return _leave(state, [number], Failed("protocol", told))


def _refuse(state: SenderState, number: int, kind: str, text: str) -> _Step:
    """Send a stranger off; the push goes on waiting for those whom it is for."""
    state = replace(state.without_link(number), refusals=(*state.refusals, text)[-_MAX_REFUSALS:])
    return state, [Send(number, Failed(kind, text)), Drop(number)]


def _fail(state: SenderState, kind: str, text: str, origin: int | None = None) -> _Step:
    """End the push: tell every receiver, give up the buffer, keep those who may have it mapped as leaving."""
    greeted = [number for number, link in state.links.items() if link.phase is not LinkPhase.NEW]
    leaving = [n for n in greeted if state.links[n].phase is not LinkPhase.LEAVING or n == origin]
    state, actions = _leave(state, leaving, Failed(kind, text[:_MAX_TEXT]))
    state, retired = _retire_buffer(state)
    state = replace(state, phase=SenderPhase.IDLE, is_filling=False, progress=state.progress + 1)
    return state, [*actions, *retired, Fail(text)]


def _quit(state: SenderState) -> _Step:
    links = [number for number, link in state.links.items() if link.phase is not LinkPhase.LEAVING]
    state, actions = _leave(state, links, Close())
    state, retired = _retire_buffer(state)
    return state, [*actions, *retired]


def _leave(state: SenderState, numbers: list[int], farewell: Frame | None = None) -> _Step:
    """Part from these links: at once where nothing is mapped, else when the peer has closed its mapping or is gone."""
    actions: list[SenderAction] = []
    for number in numbers:
        if farewell is not None:
            actions.append(Send(number, farewell))
        if state.links[number].maps is None:
            actions.append(Drop(number))
            state = state.without_link(number)
        else:
            state = state.with_link(number, replace(state.links[number], phase=LinkPhase.LEAVING))
    return state, actions


def _retire_buffer(state: SenderState) -> _Step:
    """End the current buffer's generation; it is freed now, or when the last that maps it is gone."""
    if not state.has_buffer:
        return state, []
    old = state.generation
    state = replace(state, generation=old + 1, has_buffer=False)
    return state, _free_if_unmapped(state, old)


def _free_if_unmapped(state: SenderState, generation: int | None) -> list[SenderAction]:
    is_current = state.has_buffer and generation == state.generation
    if generation is None or is_current or any(link.maps == generation for link in state.links.values()):
        return []
    return [Free(generation)]


def _wants_another(state: SenderState, link: Link) -> str:
    return f"receiver {link.rank} waits for version {link.wanted}, not for {state.version}"
