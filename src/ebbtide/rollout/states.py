"""The three states of a backend, and who may do what in each; every backend drives one `Gate`."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Literal

from ebbtide.errors import RolloutError, problem
from ebbtide.rollout.base import Asleep, Awake, Loading, RolloutState, require_awake

__all__ = ["Gate"]


class Gate:
    """Where a backend stands, whether it may draw tokens, and how many calls are generating.

    Attributes:
        state: as `RolloutBackend.state`.
    """

    def __init__(self) -> None:
        self.state: RolloutState = Loading(0)
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._num_generating = 0
        self._version_asleep = 0
        self._is_receiving = False
        self._is_closed = False

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """For the length of one `generate` call.

        Raises:
            RolloutError: not awake.
        """
        self._require_open()
        require_awake(self.state)
        self._num_generating += 1
        try:
            yield
        finally:
            self._num_generating -= 1

    async def turn(self) -> int:
        """Wait while paused; the version to draw the next tokens from.

        Raises:
            RolloutError: not awake.
        """
        await asyncio.sleep(0)  # a control call may come in here
        await self._may_run.wait()
        self._require_open()
        return require_awake(self.state)

    def pause(self) -> None:
        """Nobody gets another turn."""
        self._may_run.clear()

    def resume(self) -> None:
        """Turns again.

        Raises:
            RolloutError: not awake.
        """
        self._require_open()
        require_awake(self.state)
        self._may_run.set()

    @contextlib.contextmanager
    def receiving(self, version: int) -> Iterator[None]:
        """For the length of one push; only where it ends without an error is the backend awake after it.

        Raises:
            RolloutError: asleep, generating and not paused, or receiving already.
        """
        self._require_open()
        if isinstance(self.state, Asleep):
            raise RolloutError(problem("rollout.state", self.state, "a push to a sleeping backend is lost", "Wake it"))
        if self._is_receiving:
            raise RolloutError(problem("rollout.state", self.state, "another push is under way", "Await it"))
        self._require_still("weights cannot change under running requests")
        self._is_receiving = True
        self.state = Loading(version)
        try:
            yield
            self.state = Awake(version)
        finally:
            self._is_receiving = False

    def sleep(self, level: Literal[1, 2]) -> None:
        """From awake to asleep.

        Raises:
            RolloutError: not awake, or generating and not paused.
        """
        self._require_open()
        self._require_still("a backend cannot sleep under running requests")
        self._version_asleep = require_awake(self.state)
        self.state = Asleep(level)

    def wake(self, what: Literal["weights", "cache", "all"]) -> None:
        """From asleep to awake where the weights are kept, else to loading; nothing where only the cache is woken."""
        self._require_open()
        if isinstance(self.state, Asleep) and what != "cache":
            self.state = (Awake if self.state.level == 1 else Loading)(self._version_asleep)

    def close(self) -> bool:
        """Whether this is the first time; calls that are generating end with an error."""
        is_first, self._is_closed = not self._is_closed, True
        self.state = Asleep(2)
        self._may_run.set()
        return is_first

    def _require_open(self) -> None:
        if self._is_closed:
            raise RolloutError(problem("rollout.state", "closed", "the backend was closed", "Make a new one"))

    def _require_still(self, rule: str) -> None:
        if self._num_generating and self._may_run.is_set():
            raise RolloutError(problem("rollout.generating", self._num_generating, rule, "Pause first"))
