import asyncio
import threading

import pytest

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync.worker import Wake, Worker, describe


def test_calls_run_in_one_thread_that_is_not_the_loops() -> None:
    async def run() -> None:
        worker = Worker("w")
        first = await worker.run(threading.get_ident, lambda: None)
        second = await worker.run(threading.get_ident, lambda: None)
        assert first == second != threading.get_ident()
        worker.close()

    asyncio.run(run())


def test_a_cancelled_call_is_ended_and_waited_for() -> None:
    async def run() -> None:
        worker, leave, has_left = Worker("w"), threading.Event(), threading.Event()

        def call() -> None:
            leave.wait(10)
            has_left.set()
            raise ValueError("of no interest to one who has left")

        task = asyncio.create_task(worker.run(call, leave.set))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert has_left.is_set()
        worker.close()

    asyncio.run(run())


def test_errors_come_through() -> None:
    async def run() -> None:
        worker = Worker("w")
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0, lambda: None)
        worker.close()

    asyncio.run(run())


def test_a_wake_is_readable_until_cleared() -> None:
    import select

    wake = Wake()

    def is_readable() -> bool:
        return bool(select.select([wake.fileno()], [], [], 0)[0])

    assert not is_readable()
    wake.clear()
    wake.set()
    wake.set()
    assert is_readable()
    wake.clear()
    assert not is_readable()
    wake.close()
    wake.close()


def test_errors_are_described_with_their_type_unless_they_are_ours() -> None:
    assert describe(ValueError("x")) == "ValueError: x"
    assert describe(WeightSyncError("weight='a': came twice.")) == "weight='a': came twice."
