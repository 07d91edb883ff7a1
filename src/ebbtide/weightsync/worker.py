"""One thread per half of a push: the blocking shells run in it, and the event loop stays free."""

import asyncio
import os
import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ebbtide.errors import EbbtideError
from ebbtide.weightsync import accelerator

__all__ = ["Wake", "Worker", "describe"]

T = TypeVar("T")


class Wake:
    """Ends a blocking wait from another thread: a descriptor that becomes readable."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For poll."""
        return self._fd

    def set(self) -> None:
        """Wake whoever waits, now or next."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget an earlier `set`."""
        if select.select([self._fd], [], [], 0)[0]:
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Worker:
    """Runs one blocking call at a time for an event loop; the thread starts with the first call."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, call: Callable[[], T], cancel: Callable[[], None]) -> T:
        """The call's result; where the awaiting task is cancelled, `cancel` ends the call, and its end is awaited.

        Args:
            call: blocks until done, or until `cancel` was called.
            cancel: called from the event loop's thread.
        """
        on_device = partial(_on_device, accelerator.current_index(), call)
        job = self._executor.submit(on_device)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not job.cancel():  # it has begun
                cancel()
                await asyncio.wait([future])
                future.exception()  # the caller hears of its cancellation, not of what came of it
            raise

    def close(self) -> None:
        """End the thread once its call is done."""
        self._executor.shutdown(wait=False)


def _on_device(index: int | None, call: Callable[[], T]) -> T:
    accelerator.use(index)
    return call()


def describe(error: BaseException) -> str:
    """An error as the other side is told it; ours say where they come from in their own words."""
    return str(error) if isinstance(error, EbbtideError) else f"{type(error).__name__}: {error}"
