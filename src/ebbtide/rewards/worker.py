"""A process of its own for one reward, so that whatever the reward does, the run can end it and go on.

A thread would not do: a thread cannot be stopped, and C code that keeps the interpreter's lock (a regular expression
that backtracks, a huge power) stops every thread of its process, the waiting one included. A signal reaches only the
main thread, and only between byte codes. A process can be killed at any moment. It is forked, not spawned, so that
start and restart take milliseconds and its memory is shared with the parent's.

    parent                                    worker
      Request (pickled)  ->                   reward(completions)
                         <-  Reply (JSON)     scores, or what went wrong
      end of file        ->                   exits

Requests are pickled by the parent, for rows may hold any object. Replies are JSON, so that nothing a reward returns is
executed in the parent.
"""

import ctypes
import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ebbtide.errors import DataError, problem
from ebbtide.rewards.base import Reward, RewardInput

__all__ = ["Died", "Failed", "Hung", "Outcome", "RewardWorker", "Scores"]

_HEADER = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Scores:
    """What the reward returned.

    Attributes:
        values: one each; a text instead of a number says what stood there.
        is_sequence: whether it returned a sequence at all; where not, `values` holds the one thing that it returned.
        count: completions that it was given.
    """

    values: list[float | str]
    is_sequence: bool
    count: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The reward raised: `Type: message`, and the traceback's text."""

    error: str
    trace: str


@dataclass(frozen=True, slots=True)
class Hung:
    """No reply within `seconds`; the process was killed."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended during the call; `how` says with which signal or code."""

    how: str


Outcome = Scores | Failed | Hung | Died


class RewardWorker:
    """One reward in its process: started at once, started again after it was killed or died."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._pid: int | None = None
        self._lock = threading.Lock()
        self._start()

    @property
    def pid(self) -> int | None:
        """The process, or None after `close`."""
        return self._pid

    def call(self, completions: Sequence[RewardInput], limit_s: float) -> Outcome:
        """Run the reward; back within about `limit_s` seconds, whatever happens. Threads take turns.

        Raises:
            DataError: a row holds an object that cannot be pickled.
        """
        request = _packed(completions)
        with self._lock:
            is_answered = False
            try:
                outcome = self._exchange(request, limit_s)
                is_answered = True
                return outcome
            finally:
                if not is_answered:  # interrupted: its reply must not be taken for that of the next call
                    self._discard()

    def close(self) -> None:
        """End the process; calling it again does nothing."""
        self._discard()

    def _exchange(self, request: bytes, limit_s: float) -> Outcome:
        for _ in range(2):
            if self._pid is None:
                self._start()
            deadline = time.monotonic() + limit_s
            try:
                _send(self._socket, request, deadline)
            except TimeoutError:
                self._kill()
                return Hung(limit_s)
            except OSError:  # it died while idle, so nothing that it was given is to blame
                self._kill()
                continue
            return self._reply(limit_s, deadline)
        return Died("the process of the reward does not stay alive even when idle")

    def _reply(self, limit_s: float, deadline: float) -> Outcome:
        try:
            reply = json.loads(_receive(self._socket, deadline))
        except TimeoutError:
            self._kill()
            return Hung(limit_s)
        except (OSError, EOFError):
            return Died(self._kill())
        return Failed(*reply["failed"]) if "failed" in reply else Scores(**reply)

    def _start(self) -> None:
        pid, self._socket = _fork(self._reward)
        self._pid = pid
        self._end = weakref.finalize(self, _end, pid, self._socket)

    def _kill(self) -> str:
        self._pid = None
        return str(self._end())

    def _discard(self) -> None:
        if self._pid is not None:
            self._kill()


def _packed(completions: Sequence[RewardInput]) -> bytes:
    """Plain tuples: a quarter of the time that dataclasses take. A row that stands twice is pickled once."""
    plain = [(item.prompt, item.text, item.row, item.num_tokens, item.stop_reason) for item in completions]
    try:
        return pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        rule = f"rewards run in a process of their own, and this cannot be sent there: {error}"
        raise DataError(problem("row", sorted(completions[0].row), rule, "Keep plain data in the rows")) from error


def _fork(reward: Reward) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads, as locks they hold stay locked. The worker runs the reward alone,
        # takes none of torch's locks, and were it to stick, its time limit ends it.
        warnings.simplefilter("ignore", DeprecationWarning)
        parent = os.getpid()
        pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(reward, theirs, parent)
    theirs.close()
    return pid, ours


def _end(pid: int, connection: socket.socket) -> str:
    """Kill and reap; says how the process ended if it had ended by itself."""
    connection.close()
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(max(1e-3, deadline - time.monotonic()))
    connection.sendall(_HEADER.pack(len(data)) + data)


def _receive(connection: socket.socket, deadline: float | None) -> bytearray:
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size, deadline))
    return _exactly(connection, length, deadline)


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


# From here on: in the worker.


def _serve(reward: Reward, connection: socket.socket, parent: int) -> None:
    """Answer requests until the parent is gone. Never returns."""
    code = 1
    try:
        _settle(parent)
        while True:
            request = pickle.loads(_receive(connection, None))  # noqa: S301 from our own parent, by a socket without a name
            reply = _answered(reward, request)
            connection.sendall(_HEADER.pack(len(reply)) + reply)
    except (EOFError, ConnectionError):
        code = 0
    finally:
        os._exit(code)  # the parent's exit handlers and buffers are not ours to run and flush


def _settle(parent: int) -> None:
    """Make a fork of the trainer into a worker."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.set_wakeup_fd(-1)  # an event loop of the parent would be woken by our signals
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)  # OpenMP's threads were not forked; a second one would be waited for without end


def _answered(reward: Reward, request: list[tuple[Any, ...]]) -> bytes:
    try:
        result: Any = reward([RewardInput(*fields) for fields in request])
        reply = {**_described(result), "count": len(request)}
    except BaseException as error:  # noqa: BLE001 the edge of this process; SystemExit is an answer like any other
        trace = "".join(traceback.format_exception(error))
        reply = {"failed": (f"{type(error).__name__}: {error}", trace)}
    sys.stdout.flush()
    sys.stderr.flush()
    return json.dumps(reply).encode()


def _described(result: Any) -> dict[str, Any]:
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        return {"values": [_shown(result)], "is_sequence": False}
    return {"values": [_number(value) for value in result], "is_sequence": True}


def _number(value: Any) -> float | str:
    """A float, NaN included; or a text that shows what stood in its place."""
    if type(value) is float:
        return value
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return _shown(value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return _shown(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:200] + '...'} ({type(value).__name__})"
