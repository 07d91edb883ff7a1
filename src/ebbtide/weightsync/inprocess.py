"""Trainer and rollout in one process: each weight is handed over as it is, one at a time, never as a whole set.

receive: offers its `load` ->
                              send: for each weight: cast where asked, load, let other tasks run
receive returns            <- send returns
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ebbtide.errors import WeightSyncError, problem
from ebbtide.weightsync.base import DEFAULT_DEADLINE_S, Load, NamedTensor, PushReport

__all__ = ["InProcessTransport"]


class InProcessTransport:
    """Both halves of a push in one process and one event loop.

    `load` gets the trainer's own tensors, detached, without a copy: a consumer may keep one, and then sees the next
    update in it. `owned` gives it copies instead.

    Args:
        dtype: floating-point weights of another dtype are cast to it, which makes a copy; None leaves them.
        owned: hand over copies that the consumer may keep.
        deadline_s: how long either half waits for the other to arrive.
    """

    def __init__(
        self, *, dtype: torch.dtype | None = None, owned: bool = False, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        self._dtype = dtype
        self._owned = owned
        self._deadline_s = deadline_s
        self._meeting: _Meeting | None = None
        self._is_closed = False

    @property
    def shares_tensors(self) -> Literal[True]:
        """What `load` gets stays valid: it is no view of a buffer."""
        return True

    async def send(self, weights: Iterable[NamedTensor], version: int) -> PushReport:
        """Push all weights; `load` runs in this call, between two of the event loop's turns.

        Raises:
            WeightSyncError: no receiver came, it wants another version, its `load` or the weights' iterator raised.
        """
        start = time.monotonic()
        meeting = self._join("send")
        try:
            load = await self._receiver_of(meeting, version)
            num_bytes, num_tensors = await self._stream(weights, load, meeting)
        except BaseException as error:  # whatever ends this call must end the receiver's, too
            self._end(meeting, _as_failure(error))
            raise
        self._end(meeting, None)
        return PushReport(version, num_bytes, num_tensors, time.monotonic() - start)

    async def receive(self, load: Load, version: int) -> None:
        """Take one push of exactly this version.

        Raises:
            WeightSyncError: no sender came, it brings another version, `load` raised, or the sender's side broke.
        """
        meeting = self._join("receive")
        meeting.offer.set_result((load, version))
        try:
            try:
                async with asyncio.timeout(self._deadline_s):
                    await meeting.sender_arrived.wait()
            except TimeoutError:
                raise WeightSyncError(_nobody("send", version, self._deadline_s)) from None
            # Unbounded on purpose: the sender is a task of this loop whose every way out ends the meeting.
            await meeting.ended
        finally:
            if not meeting.ended.done():
                meeting.ended.cancel()
            self._forget(meeting)

    async def close(self) -> None:
        """Refuse further pushes; nothing is kept between them."""
        self._is_closed = True

    def _join(self, half: str) -> "_Meeting":
        """The meeting of this push, made by whichever half comes first."""
        if self._is_closed:
            raise WeightSyncError(problem("transport", "inprocess", "is closed", "Make a new one"))
        if self._meeting is None:
            self._meeting = _Meeting()
        meeting = self._meeting
        if meeting.sender_arrived.is_set() if half == "send" else meeting.offer.done():
            rule = f"another {half} is under way; a push has one sender and one receiver"
            raise WeightSyncError(problem("transport", "inprocess", rule, "Await the first before the second"))
        if half == "send":
            meeting.sender_arrived.set()
        return meeting

    async def _receiver_of(self, meeting: "_Meeting", version: int) -> Load:
        try:
            async with asyncio.timeout(self._deadline_s):
                load, wanted = await asyncio.shield(meeting.offer)
        except TimeoutError:
            raise WeightSyncError(_nobody("receive", version, self._deadline_s)) from None
        if wanted != version:
            raise WeightSyncError(problem("version", version, f"the receiver waits for version {wanted}"))
        return load

    async def _stream(self, weights: Iterable[NamedTensor], load: Load, meeting: "_Meeting") -> tuple[int, int]:
        num_bytes = num_tensors = 0
        for name, tensor in _guarded(weights):
            given = self._hand_over(tensor)
            try:
                load([(name, given)])
            except Exception as error:  # the consumer's own code: whatever it raises ends the push on both sides
                rule = f"the receiver's load raised {type(error).__name__}: {error}"
                raise WeightSyncError(problem("weight", name, rule)) from error
            num_bytes += given.nbytes
            num_tensors += 1
            del tensor, given
            await asyncio.sleep(0)
            if meeting.ended.cancelled():
                raise WeightSyncError(problem("weight", name, "the receiver left in the middle of the push"))
        return num_bytes, num_tensors

    def _hand_over(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(dtype, copy=self._owned)

    def _end(self, meeting: "_Meeting", failure: WeightSyncError | None) -> None:
        self._forget(meeting)
        if meeting.ended.done():
            return
        if failure is None:
            meeting.ended.set_result(None)
        elif meeting.offer.done():
            meeting.ended.set_exception(failure)
        else:
            meeting.ended.cancel()  # nobody is there to take the exception

    def _forget(self, meeting: "_Meeting") -> None:
        if self._meeting is meeting:
            self._meeting = None


def _loop_future() -> "asyncio.Future[tuple[Load, int]]":
    return asyncio.get_running_loop().create_future()


def _loop_signal() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True)
class _Meeting:
    """Where the two halves of one push find each other; cancelling `ended` is how a receiver says that it left."""

    sender_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    offer: "asyncio.Future[tuple[Load, int]]" = field(default_factory=_loop_future)
    ended: "asyncio.Future[None]" = field(default_factory=_loop_signal)


def _guarded(weights: Iterable[NamedTensor]) -> Iterable[NamedTensor]:
    """The weights; an error of their iterator becomes the push's error."""
    iterator = iter(weights)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # the engine's own code: whatever it raises ends the push on both sides
            rule = f"the sender's weights raised {type(error).__name__}: {error}"
            raise WeightSyncError(problem("weights", type(weights).__name__, rule)) from error
        yield item
        del item


def _as_failure(error: BaseException) -> WeightSyncError:
    """A second exception object for the other call, so that neither grows the other's traceback."""
    if isinstance(error, WeightSyncError):
        failure = WeightSyncError(*error.args)
        failure.__cause__ = error.__cause__
        return failure
    failure = WeightSyncError(problem("push", type(error).__name__, "the sender's call ended before the push did"))
    failure.__cause__ = error
    return failure


def _nobody(half: str, version: int, deadline_s: float) -> str:
    rule = f"nobody called {half} within {deadline_s:g} s"
    return problem("version", version, rule, "Run send and receive of one push at the same time")
