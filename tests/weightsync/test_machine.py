"""Every interleaving of a sender and one to four receivers, with everything going wrong that can."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from ebbtide.weightsync.machine import (
    Link,
    LinkPhase,
    ReceiverPhase,
    ReceiverState,
    SenderPhase,
    SenderState,
    receiver_step,
    sender_step,
)
from ebbtide.weightsync.machine.events import (
    Arrived,
    Broke,
    Connected,
    Died,
    Drop,
    Dropped,
    Expired,
    Fail,
    Fill,
    Filled,
    Finish,
    Free,
    LoadBucket,
    MakePlan,
    Malformed,
    MapBuffer,
    Mapped,
    Planned,
    Quit,
    Recycle,
    Send,
    Start,
    Strand,
    Unmap,
    Unmapped,
)
from ebbtide.weightsync.machine.receiver import ReceiverEvent
from ebbtide.weightsync.machine.sender import SenderEvent
from ebbtide.weightsync.machine.sender_state import NUM_HALVES
from ebbtide.weightsync.messages import Bucket, Failed, Frame, Hello, Loaded, MemfdHandle, Plan, Ready, Released

RUN = "run"
POISON = (-1, -1)


@dataclass
class Wire:
    """One connection: two queues and whether each end still holds it."""

    number: int
    to_sender: deque[Frame | str] = field(default_factory=deque)
    to_receiver: deque[Frame | str] = field(default_factory=deque)
    sender_holds: bool = True
    receiver_holds: bool = True


@dataclass
class Buffer:
    """What lies in each half: (version, bucket)."""

    halves: list[tuple[int, int]] = field(default_factory=lambda: [POISON] * NUM_HALVES)
    is_free: bool = False


@dataclass
class Rank:
    """A receiver's process."""

    state: ReceiverState
    wire: Wire | None = None
    wires: list[Wire] = field(default_factory=list)
    mapped: int | None = None
    loading: Bucket | None = None  # views of this bucket are alive
    kept: set[int] = field(default_factory=set)  # generations of which views are kept for ever
    model: dict[int, int] = field(default_factory=dict)  # bucket -> the version it was loaded from
    outcome: str = ""
    is_alive: bool = True


class World:
    """The two machines, with queues for sockets and tuples for memory."""

    def __init__(self, num_receivers: int, keeps_buffer: bool, has_digest: bool, num_buckets: int) -> None:
        self.sender = SenderState(RUN, num_receivers, keeps_buffer)
        self.ranks = [Rank(ReceiverState(RUN, rank)) for rank in range(num_receivers)]
        self.wires: list[Wire] = []
        self.buffers: dict[int, Buffer] = {}
        self.fill_wanted: int | None = None
        self.outcome = ""
        self.has_digest, self.num_buckets = has_digest, num_buckets

    # The sender's shell.

    def tell_sender(self, event: SenderEvent) -> None:
        self.sender, actions = sender_step(self.sender, event)
        for action in actions:
            match action:
                case Send(link, frame, hands_over):
                    wire = self.wires[link]
                    if hands_over:  # the handle stands for the generation here
                        frame = replace(frame, buffer=MemfdHandle(self.sender.generation))
                    if wire.sender_holds and wire.receiver_holds:
                        wire.to_receiver.append(frame)
                case Drop(link):
                    self.wires[link].sender_holds = False
                case MakePlan(generation, holds):
                    assert generation not in self.buffers or not self.buffers[generation].is_free
                    self.buffers.setdefault(generation, Buffer())
                    plan = Plan(self.sender.version, "full", None, 64, self.sender.keeps_buffer, self.has_digest)
                    assert len(holds) == len(self.ranks)
                    self.tell_sender(Planned(plan))
                case Fill(index):
                    assert self.fill_wanted is None
                    self.fill_wanted = index
                case Recycle(index):
                    self.write(index, POISON)
                case Free(generation):
                    self.free(generation)
                case Finish():
                    assert self.outcome == "sending"
                    self.outcome = "done"
                    for rank in self.ranks:  # a success is one on every rank that lives
                        if rank.state.version == self.sender.version:
                            assert rank.model == dict.fromkeys(range(self.num_buckets), self.sender.version)
                case Fail():
                    assert self.outcome == "sending"
                    self.outcome, self.fill_wanted = "failed", None

    def write(self, index: int, content: tuple[int, int]) -> None:
        half, generation = index % NUM_HALVES, self.sender.generation
        buffer = self.buffers[generation]
        assert not buffer.is_free
        for rank in self.ranks:
            reads = rank.is_alive and rank.mapped == generation and rank.loading is not None
            assert not (reads and rank.loading is not None and rank.loading.index % NUM_HALVES == half), (
                "reused too early"
            )
        buffer.halves[half] = content

    def free(self, generation: int) -> None:
        for rank in self.ranks:
            is_read = rank.mapped == generation or generation in rank.kept
            assert not (rank.is_alive and is_read), "freed while mapped"
        if generation in self.buffers:
            self.buffers[generation].is_free = True

    def fill(self) -> None:
        assert self.fill_wanted is not None
        index, self.fill_wanted = self.fill_wanted, None
        self.write(index, (self.sender.version, index))
        is_last = index == self.num_buckets - 1
        self.tell_sender(Filled(Bucket(index, (), 0, is_last, index if self.has_digest else None)))

    # The receivers' shells.

    def tell_rank(self, rank: Rank, event: ReceiverEvent) -> None:
        rank.state, actions = receiver_step(rank.state, event)
        for action in actions:
            match action:
                case Send(_, frame):
                    assert rank.wire is not None
                    if isinstance(frame, Released | Loaded):
                        assert rank.loading is None, "acknowledged with a view alive"
                    if type(frame).__name__ == "Closed":
                        assert rank.mapped is None, "Closed with a mapping open"
                    if rank.wire.sender_holds:
                        rank.wire.to_sender.append(frame)
                case Drop():
                    assert rank.mapped is None
                    assert rank.wire is not None
                    rank.wire.receiver_holds, rank.wire = False, None
                case Strand():
                    assert rank.mapped is not None
                    rank.kept.add(rank.mapped)
                    rank.mapped, rank.loading, rank.wire = None, None, None
                case MapBuffer(plan):
                    assert isinstance(plan.buffer, MemfdHandle)
                    rank.mapped = plan.buffer.num_bytes  # stands for the generation here
                    self.tell_rank(rank, Mapped())
                case LoadBucket(bucket):
                    rank.loading = bucket
                case Unmap():
                    keeps = rank.loading is not None and rank.loading.index == -1
                    if not keeps:
                        rank.mapped, rank.loading = None, None
                    self.tell_rank(rank, Unmapped(not keeps))
                case Finish():
                    rank.outcome = "done"
                    assert rank.model == dict.fromkeys(range(self.num_buckets), rank.state.version)
                    assert rank.state.holds == rank.state.version
                case Fail():
                    rank.outcome = "failed"

    def finish_load(self, rank: Rank) -> None:
        bucket = rank.loading
        assert bucket is not None
        assert rank.mapped is not None
        content = self.buffers[rank.mapped].halves[bucket.index % NUM_HALVES]
        assert content == (rank.state.version, bucket.index), "the half-buffer changed under the load"
        rank.model[bucket.index] = rank.state.version
        rank.loading = None
        self.tell_rank(rank, Dropped(bucket.index))

    def receive(self, rank: Rank, version: int) -> None:
        if rank.wire is not None:
            self.drain_idle(rank)
        if rank.wire is None:
            rank.wire = Wire(len(self.wires))
            self.wires.append(rank.wire)
            rank.wires.append(rank.wire)
            self.tell_sender(Connected(rank.wire.number))
        rank.outcome = "receiving"
        self.tell_rank(rank, Start(version))

    def drain_idle(self, rank: Rank) -> None:
        """A shell looks at its connection before it uses it again."""
        wire = rank.wire
        assert wire is not None
        if wire.to_receiver or not wire.sender_holds:
            event: ReceiverEvent = Died(0)
            if wire.to_receiver:
                frame = wire.to_receiver.popleft()
                event = Malformed(0, frame) if isinstance(frame, str) else Arrived(0, frame)
            self.tell_rank(rank, event)

    def kill(self, rank: Rank) -> None:
        rank.is_alive, rank.mapped, rank.loading = False, None, None
        rank.kept.clear()
        for wire in rank.wires:
            wire.receiver_holds = False
        rank.wire = None

    def revive(self, index: int) -> None:
        self.ranks[index] = Rank(ReceiverState(RUN, index))

    # The wires.

    def deliverable_to_sender(self) -> list[Wire]:
        return [w for w in self.wires if w.sender_holds and (w.to_sender or not w.receiver_holds)]

    def deliverable_to_ranks(self) -> list[Rank]:
        return [
            rank
            for rank in self.ranks
            if rank.wire is not None
            and rank.is_alive
            and rank.outcome == "receiving"
            and rank.loading is None
            and (rank.wire.to_receiver or not rank.wire.sender_holds)
        ]

    def deliver_to_sender(self, wire: Wire) -> None:
        if not wire.to_sender:
            self.tell_sender(Died(wire.number))
            return
        frame = wire.to_sender.popleft()
        self.tell_sender(Malformed(wire.number, frame) if isinstance(frame, str) else Arrived(wire.number, frame))

    def deliver_to_rank(self, rank: Rank) -> None:
        assert rank.wire is not None
        if not rank.wire.to_receiver:
            self.tell_rank(rank, Died(0))
            return
        frame = rank.wire.to_receiver.popleft()
        self.tell_rank(rank, Malformed(0, frame) if isinstance(frame, str) else Arrived(0, frame))

    def run_until_quiet(self) -> None:
        for _ in range(10_000):
            if not self.step(0):
                return
        raise AssertionError("the machines never come to rest")

    def step(self, choice: int) -> bool:
        """One of the things that can happen next without a fault; False where nothing can."""
        steps: list[Callable[[], None]] = [self.fill] if self.fill_wanted is not None else []
        steps += [partial(self.deliver_to_sender, wire) for wire in self.deliverable_to_sender()]
        steps += [partial(self.finish_load, rank) for rank in self.loading_ranks()]
        steps += [partial(self.deliver_to_rank, rank) for rank in self.deliverable_to_ranks()]
        if steps:
            steps[choice % len(steps)]()
        return bool(steps)

    def loading_ranks(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.loading is not None and rank.is_alive]

    def expire(self) -> None:
        """Deadlines pass wherever someone still waits."""
        if self.sender.phase is not SenderPhase.IDLE:
            self.tell_sender(Expired())
        for rank in self.ranks:
            if rank.is_alive and rank.outcome == "receiving" and rank.loading is None:
                self.tell_rank(rank, Expired())

    def push(self, version: int) -> None:
        self.outcome = "sending"
        self.tell_sender(Start(version))
        for rank in self.ranks:
            self.receive(rank, version)


CHOICES = st.lists(st.integers(0, 5), min_size=5, max_size=30)


class Chaos(RuleBasedStateMachine):
    """Hypothesis chooses what happens next; the World's assertions and the invariants judge."""

    world: World
    version = 0

    @initialize(num=st.integers(1, 4), keeps=st.booleans(), digest=st.booleans(), buckets=st.integers(1, 5))
    def begin(self, num: int, keeps: bool, digest: bool, buckets: int) -> None:
        self.world = World(num, keeps, digest, buckets)

    def rank(self, index: int) -> Rank:
        return self.world.ranks[index % len(self.world.ranks)]

    @precondition(lambda self: self.world.sender.phase is SenderPhase.IDLE)
    @rule()
    def send(self) -> None:
        self.version += 1
        self.world.outcome = "sending"
        self.world.tell_sender(Start(self.version))

    @rule(index=st.integers(0, 3), skew=st.sampled_from([0, 0, 0, 0, 0, 1]))
    def receive(self, index: int, skew: int) -> None:
        rank = self.rank(index)
        if rank.is_alive and rank.outcome != "receiving":
            self.world.receive(rank, self.version + skew)

    @precondition(lambda self: self.world.sender.phase is SenderPhase.IDLE)
    @rule(choices=CHOICES)
    def push(self, choices: list[int]) -> None:
        self.send()
        for index in range(len(self.world.ranks)):
            self.receive(index, 0)
        self.go_on(choices)

    @rule(choices=CHOICES)
    def go_on(self, choices: list[int]) -> None:
        for choice in choices:
            self.world.step(choice)

    def some_loading(self, index: int) -> Rank | None:
        loading = self.world.loading_ranks()
        return loading[index % len(loading)] if loading else None

    # Faults.

    @rule(index=st.integers(0, 3), keeps_view=st.booleans())
    def load_raises(self, index: int, keeps_view: bool) -> None:
        if rank := self.some_loading(index):
            assert rank.loading is not None
            rank.loading = replace_index(rank.loading) if keeps_view else None
            self.world.tell_rank(rank, Broke("load", "ValueError"))

    @precondition(lambda self: self.world.sender.phase is not SenderPhase.IDLE)
    @rule()
    def sender_breaks(self) -> None:
        self.world.tell_sender(Broke("weights", "RuntimeError"))

    @rule(index=st.integers(0, 3))
    def kill(self, index: int) -> None:
        if self.rank(index).is_alive:
            self.world.kill(self.rank(index))

    @rule(index=st.integers(0, 3))
    def revive(self, index: int) -> None:
        if not self.rank(index).is_alive:
            self.world.revive(index % len(self.world.ranks))

    @rule(who=st.integers(0, 4))
    def deadline(self, who: int) -> None:
        if who == 4:
            if self.world.sender.phase is not SenderPhase.IDLE:
                self.world.tell_sender(Expired())
            return
        rank = self.rank(who)
        if rank.is_alive and rank.outcome == "receiving" and rank.loading is None:
            self.world.tell_rank(rank, Expired())

    @rule(index=st.integers(0, 20), how=st.sampled_from(["lose", "double", "swap", "garbage", "run", "version"]))
    def hurt_a_frame(self, index: int, how: str) -> None:
        queues = [queue for wire in self.world.wires for queue in (wire.to_sender, wire.to_receiver) if queue]
        if queues:
            hurt(queues[index % len(queues)], how)

    @precondition(lambda self: self.world.sender.phase is SenderPhase.IDLE)
    @rule()
    def close_the_sender(self) -> None:
        self.world.tell_sender(Quit())

    @rule(index=st.integers(0, 3))
    def close_a_receiver(self, index: int) -> None:
        rank = self.rank(index)
        if rank.is_alive and rank.outcome != "receiving":
            self.world.tell_rank(rank, Quit())

    # What must hold, whatever happened.

    @invariant()
    def no_model_is_a_mixture_unless_it_is_known_to_be_torn(self) -> None:
        for rank in self.world.ranks if hasattr(self, "world") else []:
            if rank.state.holds is not None:
                assert rank.model == dict.fromkeys(range(self.world.num_buckets), rank.state.holds)

    @invariant()
    def nobody_reads_freed_memory(self) -> None:
        for rank in self.world.ranks if hasattr(self, "world") else []:
            if rank.is_alive and rank.mapped is not None:
                assert not self.world.buffers[rank.mapped].is_free

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(3):
            world.run_until_quiet()
            world.expire()
        world.run_until_quiet()
        assert world.sender.phase is SenderPhase.IDLE
        assert world.outcome in ("", "done", "failed")
        for index, rank in enumerate(world.ranks):
            assert rank.outcome in ("", "done", "failed") or not rank.is_alive
            if not rank.is_alive:
                world.revive(index)
        self._the_next_push_succeeds()
        self._nothing_is_left()

    def _the_next_push_succeeds(self) -> None:
        world = self.world
        world.push(self.version + 10)
        world.run_until_quiet()
        assert world.outcome == "done"
        assert [rank.outcome for rank in world.ranks] == ["done"] * len(world.ranks)

    def _nothing_is_left(self) -> None:
        world = self.world
        for index in range(len(world.ranks)):
            world.kill(world.ranks[index])
        world.run_until_quiet()
        world.tell_sender(Quit())
        world.run_until_quiet()
        assert all(buffer.is_free for buffer in world.buffers.values())
        assert not world.sender.links


def replace_index(bucket: Bucket) -> Bucket:
    """Marks a bucket of which the consumer keeps a view for ever."""
    return Bucket(-1, bucket.entries, bucket.num_bytes, bucket.is_last, bucket.digest)


def hurt(queue: deque[Frame | str], how: str) -> None:
    first = queue[0]
    if how == "lose":
        queue.popleft()
    elif how == "double":
        queue.appendleft(first)
    elif how == "swap" and len(queue) > 1:
        queue[0], queue[1] = queue[1], queue[0]
    elif how == "garbage":
        queue[0] = "not msgpack"
    elif how == "run" and isinstance(first, Hello):
        queue[0] = Hello(first.protocol + (first.rank % 2), "another", first.rank, first.pid)
    elif how == "version" and isinstance(first, Ready):
        queue[0] = Ready(first.version + 1, first.holds)
    elif how == "version" and isinstance(first, Released):
        queue[0] = Released(first.version + 1, first.digest)


TestChaos = Chaos.TestCase
TestChaos.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_push_without_faults_ends_well_in_both_modes() -> None:
    for keeps in (True, False):
        for num in (1, 2, 4):
            world = World(num, keeps, True, 5)
            for version in (1, 2, 3):
                world.push(version)
                world.run_until_quiet()
                assert world.outcome == "done"
                assert [rank.state.holds for rank in world.ranks] == [version] * num
                assert [rank.mapped is not None for rank in world.ranks] == [keeps] * num
            assert sum(not buffer.is_free for buffer in world.buffers.values()) == int(keeps)


def test_a_stopped_receiver_keeps_the_buffer_from_being_freed_until_it_is_gone() -> None:
    world = World(1, True, False, 4)
    world.push(1)
    while world.ranks[0].loading is None:
        wires, ranks = world.deliverable_to_sender(), world.deliverable_to_ranks()
        if world.fill_wanted is not None:
            world.fill()
        elif wires:
            world.deliver_to_sender(wires[0])
        else:
            world.deliver_to_rank(ranks[0])
    world.tell_sender(Expired())
    assert world.outcome == "failed"
    assert not world.buffers[0].is_free
    world.kill(world.ranks[0])
    world.deliver_to_sender(world.deliverable_to_sender()[0])
    assert world.buffers[0].is_free


def test_releasing_before_the_mapping_is_closed_is_what_the_order_forbids() -> None:
    state = ReceiverState(RUN, 0, is_connected=True, is_greeted=True, is_mapped=True, holds=1)
    state = replace(state, phase=ReceiverPhase.LISTENING, version=2, plan=Plan(2, "full", None, 64, False, False))
    state, actions = receiver_step(state, Arrived(0, Bucket(0, (), 0, True)))
    assert [type(action) for action in actions] == [LoadBucket]
    assert state.holds is None
    state, actions = receiver_step(state, Dropped(0))
    assert [action.frame for action in actions if isinstance(action, Send)] == [Loaded(0), Released(2, None)]


def test_the_deadlines_error_names_who_is_awaited_though_another_has_left() -> None:
    links = {0: Link(LinkPhase.RELEASED, 1, maps=0)}
    state = SenderState(RUN, 2, False, phase=SenderPhase.CLOSING, version=1, links=links, has_buffer=True)
    _, actions = sender_step(state, Expired())
    assert Fail("receivers [1] did not close their mapping") in actions


def test_a_strangers_failure_is_told_to_it_and_the_push_waits_on() -> None:
    state, _ = sender_step(SenderState(RUN, 1), Start(1))
    state, _ = sender_step(state, Connected(7))
    state, actions = sender_step(state, Arrived(7, Hello(1, "another", 0, 1)))
    assert actions == [Send(7, Failed("run", "rank 0 belongs to run 'another', this is 'run'")), Drop(7)]
    assert state.phase is SenderPhase.GATHERING
    state, actions = sender_step(state, Expired())
    [fail] = actions
    assert isinstance(fail, Fail)
    assert "receivers [0] of 1 have not come" in fail.text
    assert "'another'" in fail.text
