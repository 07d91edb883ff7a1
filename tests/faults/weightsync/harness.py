"""A sender and two receivers, each a process, one of which breaks on purpose at a given moment.

Every fault must end well: the push fails on every rank that still runs, within the deadline and with the cause named;
then the next push succeeds, with a new process in place of one that is dead or stopped (and stays stopped); and no
descriptor, mapping, folder or shared segment is left.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

import ebbtide.weightsync.receiver as receiver_module
from ebbtide.errors import WeightSyncError
from ebbtide.weightsync import MemfdTransport, NamedTensor, SenderOptions, SocketReceiver
from ebbtide.weightsync.folder import PrivateFolder
from ebbtide.weightsync.link import Incoming, Link, UnixListener
from ebbtide.weightsync.memfd import MemfdBuffer, MemfdMapping
from ebbtide.weightsync.messages import Frame, encode

__all__ = ["Fault", "Verdict", "all_faults", "try_fault"]

NUM_RECEIVERS = 2
BUCKET = 4096
SLACK_S = 2.0  # of a machine with other things to do
SHAPES = {"embed": (3000,), "a": (500,), "b": (20, 20), "c": (900,)}  # float32: about six buckets


@dataclass(frozen=True)
class Fault:
    """What breaks.

    Attributes:
        who: sender, receiver 0 or receiver 1.
        how: what it does instead of what it should.
        where: the frame that it was about to send, the part that raises, or `idle` between two pushes.
        keeps_buffer: the mode of the push.
    """

    who: str
    how: str
    where: str
    keeps_buffer: bool = True

    def __str__(self) -> str:
        return f"{self.who}-{self.how}-{self.where}{'' if self.keeps_buffer else '-free'}".replace(" ", "")


@dataclass
class Verdict:
    """What came of it: problems, none where it ended well, and what was left behind."""

    problems: list[str] = field(default_factory=list)
    num_left: int = 0


def all_faults() -> list[Fault]:
    """Each way to break, at each moment where it can happen."""
    faults = []
    lethal = ("kill", "stop", "close")
    wires = ("garbage", "truncated", "flood", "lose", "double")
    for who in ("receiver 0", "receiver 1"):
        faults += [Fault(who, how, frame) for frame in RECEIVER_FRAMES[:-1] for how in lethal]
        faults += [Fault(who, how, "idle") for how in lethal]
        faults += [Fault(who, "raise", part) for part in ("load", "synchronize", "release", "keep", "map")]
        faults += [Fault(who, how, "Hello") for how in ("protocol", "run", "rank")]
    for frame in RECEIVER_FRAMES[:-1]:
        faults += [Fault("receiver 1", how, frame) for how in wires]
    faults += [Fault("receiver 0", "version", frame) for frame in ("Ready", "Released")]
    faults += [Fault("receiver 0", how, "Closed", keeps_buffer=False) for how in (*lethal, "garbage")]
    for frame in SENDER_FRAMES[:-1]:
        faults += [Fault("sender", how, frame) for how in (*lethal, *wires)]
    faults += [Fault("sender", "raise", part) for part in ("weights", "write", "synchronize", "buffer")]
    faults += [Fault("sender", how, "Hello") for how in ("protocol", "run")]
    faults += [Fault("sender", "version", frame) for frame in ("Plan", "Commit")]
    faults += [Fault("sender", how, "Close", keeps_buffer=False) for how in (*lethal, "garbage")]
    faults += [Fault("sender", how, "idle") for how in ("kill", "stop")]
    return faults


RECEIVER_FRAMES = ("Hello", "Ready", "Loaded", "Released", "Closed")
SENDER_FRAMES = ("Hello", "Plan", "Bucket", "Commit", "Close")


# In the process that breaks.


class Saboteur:
    """Breaks once, when the frame of the fault is about to be sent."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault

    def take(self, where: str) -> str | None:
        """How to break here, if this is the moment."""
        if self.fault is None or self.fault.where != where:
            return None
        how, self.fault = self.fault.how, None
        return how

    def raise_at(self, part: str) -> None:
        if self.take(part) == "raise":
            raise OSError(f"boom in {part}")


class SabotagedLink:
    """A link that breaks where its saboteur says."""

    def __init__(self, link: Link, saboteur: Saboteur) -> None:
        self._link, self._saboteur = link, saboteur
        self._socket: socket.socket = link._socket  # type: ignore[attr-defined]

    def send(self, frame: Frame, descriptors: tuple[int, ...], deadline_s: float) -> bool:
        how = self._saboteur.take(type(frame).__name__)
        if how is None:
            return self._link.send(frame, descriptors, deadline_s)
        if how in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        elif how == "close":
            self._socket.shutdown(socket.SHUT_RDWR)
        elif how == "garbage":
            self._raw(b"\xc1 no frame at all")
        elif how == "truncated":
            self._raw(encode(frame)[:-1])
        elif how == "flood":
            noise = random.Random(0)
            for _ in range(10_000):
                self._raw(noise.randbytes(noise.randrange(1, 64)))
        elif how == "double":
            self._link.send(frame, descriptors, deadline_s)
            self._link.send(frame, descriptors, deadline_s)
        elif how != "lose":
            self._link.send(_changed(frame, how), descriptors, deadline_s)
        return True

    def _raw(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(data)

    def fileno(self) -> int:
        return self._link.fileno()

    def receive(self) -> list[Incoming]:
        return self._link.receive()

    def take_descriptors(self) -> list[int]:
        return self._link.take_descriptors()

    def is_peer_dead(self) -> bool:
        return self._link.is_peer_dead()

    def close(self) -> None:
        self._link.close()


def _changed(frame: Any, how: str) -> Frame:
    changes: dict[str, dict[str, Any]] = {
        "protocol": {"protocol": 99},
        "run": {"run": "another"},
        "rank": {"rank": 7},
        "version": {"version": 77},
    }
    changed: Frame = msgspec.structs.replace(frame, **changes[how])
    return changed


class Consumer:
    """Parameters of a rollout, and a load that breaks on request."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.saboteur = saboteur
        self.kept: list[torch.Tensor] = []

    def load(self, weights: Sequence[NamedTensor]) -> None:
        if "embed" in self.weights:  # what comes after it are views; it was put together from slices
            self.saboteur.raise_at("load")
            if self.saboteur.take("keep") == "raise":
                self.kept += [tensor[:1] for _, tensor in weights]
        for name, tensor in weights:
            self.weights[name] = tensor.clone()


def _run_receiver(pipe: Connection, address: str, rank: int, fault: Fault | None, deadline_s: float) -> None:
    saboteur = Saboteur(fault)
    consumer = Consumer(saboteur)
    plain_connect: Callable[[str, float], Link] = vars(receiver_module)["connect"]
    vars(receiver_module)["connect"] = lambda *where: SabotagedLink(plain_connect(*where), saboteur)
    _raise_before(MemfdMapping, "synchronize", saboteur, "synchronize")
    _raise_before(MemfdMapping, "kept", saboteur, "release")
    _raise_before(MemfdMapping, "__init__", saboteur, "map")
    receiver = SocketReceiver(address, rank, deadline_s=deadline_s)
    baseline = _leftovers()
    for command, value in iter(pipe.recv, None):
        if command == "address":
            receiver.close_blocking()
            receiver = SocketReceiver(value, rank, deadline_s=deadline_s)
        elif command == "push":
            pipe.send(_outcome(partial(receiver.receive_blocking, consumer.load, value)))
            consumer.kept.clear()
        elif command == "check":
            total = {name: float(tensor.double().sum()) for name, tensor in consumer.weights.items()}
            pipe.send((total, receiver.holds))
    receiver.close_blocking()
    pipe.send(_leftovers() - baseline + 1)  # the receiver of the baseline had an eventfd


def _run_sender(pipe: Connection, folder: str, _rank: int, fault: Fault | None, deadline_s: float) -> None:
    baseline = _leftovers()
    saboteur = Saboteur(fault)
    accept = UnixListener.accept

    def sabotaged(listener: UnixListener) -> Link | None:
        link = accept(listener)
        return None if link is None else SabotagedLink(link, saboteur)

    setattr(UnixListener, "accept", sabotaged)  # noqa: B010 a method of a class, replaced in this process alone
    _raise_before(MemfdBuffer, "write", saboteur, "write")
    _raise_before(MemfdBuffer, "synchronize", saboteur, "synchronize")
    _raise_before(MemfdBuffer, "__init__", saboteur, "buffer")
    keeps = fault.keeps_buffer if fault is not None else True
    options = SenderOptions(
        num_receivers=NUM_RECEIVERS, bucket_bytes=BUCKET, deadline_s=deadline_s, keep_buffer=keeps, has_digest=True
    )
    sender = MemfdTransport(options, Path(folder)).sender
    pipe.send(sender.address)
    for _command, version in iter(pipe.recv, None):
        pipe.send(_outcome(partial(sender.send_blocking, _weights(version, saboteur), version)))
    sender.close_blocking()
    pipe.send(_leftovers() - baseline)


def _weights(version: int, saboteur: Saboteur) -> Any:
    for name, shape in SHAPES.items():
        if name == "b":
            saboteur.raise_at("weights")
        yield name, torch.full(shape, float(version))


def _raise_before(owner: type, name: str, saboteur: Saboteur, part: str) -> None:
    plain = getattr(owner, name)

    def sabotaged(self: Any, *args: Any) -> Any:
        saboteur.raise_at(part)
        return plain(self, *args)

    setattr(owner, name, sabotaged)


def _outcome(call: Callable[[], object]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        call()
    except WeightSyncError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def _leftovers() -> int:
    """Open descriptors, and mappings of a push's buffer."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:ebbtide-push")
    return len(list(Path("/proc/self/fd").iterdir())) + maps


# In the process that judges.


class Actor:
    """One of the three processes."""

    def __init__(
        self, main: Callable[..., None], address: str, rank: int, fault: Fault | None, deadline_s: float
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_as_process, args=(main, theirs, address, rank, fault, deadline_s))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the child takes no lock
            self.process.start()
        theirs.close()

    def ask(self, command: str, value: object) -> None:
        with contextlib.suppress(OSError):  # of a dead one, which `answer` tells
            self.pipe.send((command, value))

    def answer(self, timeout_s: float) -> Any:
        """What it says; None where it is dead or stopped."""
        try:
            return self.pipe.recv() if self.pipe.poll(timeout_s) else None
        except (EOFError, OSError):
            return None

    def finish(self, timeout_s: float) -> int:
        """Let it close; how many descriptors and mappings it has more than at its start."""
        try:
            self.pipe.send(None)
        except OSError:
            return 0
        left = self.answer(timeout_s)
        self.end()
        return 1_000_000 if left is None else int(left)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.pipe.close()


def _as_process(main: Callable[..., None], pipe: Connection, *args: Any) -> None:
    os.setsid()
    torch.set_num_threads(1)
    try:
        main(pipe, *args)
    finally:
        os._exit(0)


def try_fault(fault: Fault, deadline_s: float = 2.0) -> Verdict:
    """Break once, and see that all ends well."""
    verdict = Verdict()
    with tempfile.TemporaryDirectory() as folder:
        trial = _Trial(fault, deadline_s, verdict, Path(folder))
        try:
            trial.run()
        finally:
            for actor in trial.everyone:
                actor.end()
        PrivateFolder(Path(folder)).close()  # the next sender removes the folder of one that was stopped, then killed
        names = [*Path(folder).iterdir(), *Path("/dev/shm").glob("*ebbtide*")]
    verdict.num_left += len(names)
    if names:
        verdict.problems.append(f"left behind: {sorted(map(str, names))}")
    return verdict


class _Trial:
    def __init__(self, fault: Fault, deadline_s: float, verdict: Verdict, folder: Path) -> None:
        self.folder = str(folder)
        self.fault, self.deadline_s, self.verdict = fault, deadline_s, verdict
        self.everyone: list[Actor] = []
        broken = [fault if fault.who == f"receiver {rank}" else None for rank in range(NUM_RECEIVERS)]
        sender_fault = fault if fault.who == "sender" else Fault("", "", "", fault.keeps_buffer)
        self.sender = self._start(_run_sender, self.folder, -1, sender_fault)
        self.address: str = self.sender.answer(20)
        self.receivers = [self._start(_run_receiver, self.address, r, broken[r]) for r in range(NUM_RECEIVERS)]

    def _start(self, main: Callable[..., None], address: str, rank: int, fault: Fault | None) -> Actor:
        self.everyone.append(Actor(main, address, rank, fault, self.deadline_s))
        return self.everyone[-1]

    def run(self) -> None:
        version = 1
        if self.fault.where == "idle":
            self._expect_success(version)
            self._strike_while_idle()
            version += 1
        self._expect_failure(version)
        self._replace_the_fallen()
        self._expect_success(version + 1)
        for name, actor in reversed(self._actors().items()):  # receivers first, as in an orderly end
            left = actor.finish(10)
            self.verdict.num_left += max(0, left)
            if left > 0:
                self.verdict.problems.append(f"{name} has {left} descriptors or mappings more than at its start")

    def _actors(self) -> dict[str, Actor]:
        return {"sender": self.sender, **{f"receiver {rank}": actor for rank, actor in enumerate(self.receivers)}}

    def _push(self, version: int, fallen: str = "") -> dict[str, tuple[str, float] | None]:
        for actor in self._actors().values():
            actor.ask("push", version)
        patience = self.deadline_s + SLACK_S
        names = sorted(self._actors(), key=lambda name: name == fallen)  # who will not answer is asked last
        return {name: self._actors()[name].answer(0.2 if name == fallen else patience) for name in names}

    def _strike_while_idle(self) -> None:
        victim = self._actors()[self.fault.who]
        if self.fault.how == "close":
            victim.ask("address", "unix:/nowhere")
            return
        os.kill(victim.process.pid or 0, signal.SIGKILL if self.fault.how == "kill" else signal.SIGSTOP)

    def _expect_failure(self, version: int) -> None:
        outcomes = self._push(version, self.fault.who if self.fault.how in ("kill", "stop") else "")
        if self.fault.how != "double" and all(outcome is not None and not outcome[0] for outcome in outcomes.values()):
            self.verdict.problems.append("nobody noticed")
        for name, outcome in outcomes.items():
            if outcome is None:
                if name != self.fault.who or self.fault.how not in ("kill", "stop"):
                    self.verdict.problems.append(f"{name} gave no answer within the deadline")
                continue
            text, seconds = outcome
            if not text and self._may_succeed(name):
                continue
            if not text:
                self.verdict.problems.append(f"{name} thinks that the push has succeeded")
            elif seconds > self.deadline_s + SLACK_S:
                self.verdict.problems.append(f"{name} took {seconds:.1f} s")
            self._judge_text(name, text, seconds)

    def _may_succeed(self, name: str) -> bool:
        """A repeated frame may be harmless, and the last frames of a push concern one rank: the others are done."""
        if self.fault.how == "double":
            return True
        if self.fault.where in ("Commit", "Close"):
            return self.fault.how != "kill"
        return self.fault.where == "Closed" and name != "sender"

    def _judge_text(self, name: str, text: str, seconds: float) -> None:
        fault = self.fault
        is_told = fault.how == "raise" and fault.where != "keep"
        if is_told and f"boom in {fault.where}" not in text:
            self.verdict.problems.append(f"{name} does not name the cause: {text}")
        in_push = fault.where not in ("Hello", "Ready")
        if fault.how in ("kill", "raise") and in_push and name != fault.who:
            if fault.who not in text:
                self.verdict.problems.append(f"{name} does not name {fault.who}: {text}")
            if seconds > max(1.0, self.deadline_s * 0.75):
                self.verdict.problems.append(f"{name} took {seconds:.1f} s to see it")

    def _replace_the_fallen(self) -> None:
        if self.fault.how not in ("kill", "stop") and not (self.fault.where == "idle" and self.fault.how == "close"):
            return
        if self.fault.who == "sender":
            self.sender = self._start(_run_sender, self.folder, -1, None)
            self.address = self.sender.answer(20)
            for receiver in self.receivers:
                receiver.ask("address", self.address)
        elif self.fault.how == "close":
            self._actors()[self.fault.who].ask("address", self.address)
        else:
            rank = int(self.fault.who[-1])
            self.receivers[rank] = self._start(_run_receiver, self.address, rank, None)

    def _expect_success(self, version: int) -> None:
        for name, outcome in self._push(version).items():
            if outcome is None or outcome[0]:
                self.verdict.problems.append(f"push of version {version}: {name}: {outcome}")
        expected = {name: float(version * torch.Size(shape).numel()) for name, shape in SHAPES.items()}
        for rank, receiver in enumerate(self.receivers):
            receiver.ask("check", None)
            if (found := receiver.answer(10)) != (expected, version):
                self.verdict.problems.append(f"receiver {rank} holds {found}")
