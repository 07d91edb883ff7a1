"""A reward in its process: whatever it does, the call comes back, and nothing stays behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import DataError
from ebbtide.rewards.base import RewardInput
from ebbtide.rewards.worker import Died, Failed, Hung, RewardWorker, Scores
from ebbtide.types import StopReason


def _input(text: str, **row: Any) -> RewardInput:
    return RewardInput("p", text, row, 1, StopReason.EOS)


class _Reward:
    """Does what a function says with the texts."""

    def __init__(self, act: Callable[[list[str]], Any]) -> None:
        self.act = act

    def __call__(self, completions: Sequence[RewardInput]) -> Any:
        return self.act([completion.text for completion in completions])


@contextmanager
def _worker(act: Callable[[list[str]], Any]) -> Iterator[RewardWorker]:
    worker = RewardWorker(_Reward(act))
    try:
        yield worker
    finally:
        worker.close()


def _unless(bad: Callable[[], Any]) -> Callable[[list[str]], Any]:
    """Lengths; a text `bad` sets the fault off."""

    def act(texts: list[str]) -> list[float]:
        if "bad" in texts:
            bad()
        return [float(len(text)) for text in texts]

    return act


def _loop() -> None:
    while True:
        pass


def _deaf_loop() -> None:
    """Takes every exception for a setback, as careless code does, and asks for no signal to be heard."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            time.sleep(0.01)
        except BaseException:  # noqa: BLE001 that is the point
            continue


def _backtrack() -> None:
    """C code that keeps the interpreter's lock: a thread that waits for it would wait too."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def _call(worker: RewardWorker, *texts: str, limit_s: float = 30) -> Any:
    return worker.call([_input(text) for text in texts], limit_s)


def test_scores_come_back_in_order() -> None:
    with _worker(_unless(_loop)) as worker:
        assert _call(worker, "a", "bcd", "") == Scores([1.0, 3.0, 0.0], True, 3)


def test_the_reward_sees_the_whole_completion() -> None:
    seen = RewardInput([{"role": "user", "content": "q"}], "t", {"a": [1, {"b": None}]}, 7, StopReason.LENGTH)

    class _Same:
        def __call__(self, completions: Sequence[RewardInput]) -> list[float]:
            return [
                float(completion == seen and completion.stop_reason is StopReason.LENGTH) for completion in completions
            ]

    worker = RewardWorker(_Same())
    assert worker.call([seen], 30) == Scores([1.0], True, 1)
    worker.close()


def test_what_a_reward_keeps_stays_in_its_process() -> None:
    kept: list[int] = []

    def act(texts: list[str]) -> list[int]:
        kept.append(1)
        return [len(kept)] * len(texts)

    with _worker(act) as worker:
        assert [_call(worker, "x").values for _ in range(3)] == [[1.0], [2.0], [3.0]]
    assert kept == []


@pytest.mark.parametrize("bad", [_loop, _deaf_loop, _backtrack], ids=["loop", "deaf", "holds_the_lock"])
def test_a_hang_ends_at_its_limit_and_the_next_call_works(bad: Callable[[], Any]) -> None:
    with _worker(_unless(bad)) as worker:
        first = worker.pid
        assert _call(worker, "bad", limit_s=0.2) == Hung(0.2)
        assert worker.pid is None
        assert _call(worker, "ok") == Scores([2.0], True, 1)
        assert worker.pid not in (None, first)


def test_many_hangs_leave_no_thread_descriptor_or_process() -> None:
    with _worker(_unless(_loop)) as worker:
        _call(worker, "bad", limit_s=0.02)
        threads, descriptors = threading.active_count(), _num_descriptors()
        for _ in range(20):
            assert isinstance(_call(worker, "bad", limit_s=0.02), Hung)
        assert threading.active_count() == threads
        assert _num_descriptors() == descriptors


@pytest.mark.parametrize(
    ("bad", "how"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "signal SIGTERM"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal SIGKILL"),
    ],
)
def test_a_death_is_told_apart_from_a_hang(bad: Callable[[], Any], how: str) -> None:
    with _worker(_unless(bad)) as worker:
        assert _call(worker, "bad") == Died(how)
        assert _call(worker, "ok") == Scores([2.0], True, 1)


def test_a_worker_that_died_while_idle_is_replaced_without_a_word() -> None:
    with _worker(_unless(_loop)) as worker:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert _call(worker, "ok") == Scores([2.0], True, 1)


@pytest.mark.parametrize("error", [KeyError("boom"), SystemExit(3), KeyboardInterrupt(), RecursionError("deep")])
def test_what_is_raised_comes_back_with_its_traceback(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with _worker(_unless(fail)) as worker:
        outcome = _call(worker, "bad")
        assert isinstance(outcome, Failed)
        assert outcome.error == f"{type(error).__name__}: {error}"
        assert "in fail" in outcome.trace
        pid = worker.pid
        assert _call(worker, "ok") == Scores([2.0], True, 1)
        assert worker.pid == pid, "an exception does not cost the process"


@pytest.mark.parametrize(
    ("returned", "values", "is_sequence"),
    [
        ([True, 2, 0.5], [1.0, 2.0, 0.5], True),
        (None, ["None (NoneType)"], False),
        (1.0, ["1.0 (float)"], False),
        ("12", ["'12' (str)"], False),
        ({"a": 1}, ["{'a': 1} (dict)"], False),
        (["1", None], ["'1' (str)", "None (NoneType)"], True),
        ([], [], True),
        ([[1.0]], ["[1.0] (list)"], True),
        ([10**400], [f"{str(10**400)[:200]}... (int)"], True),
    ],
)
def test_what_is_returned_is_described(returned: Any, values: list[Any], is_sequence: bool) -> None:
    with _worker(lambda _texts: returned) as worker:
        assert _call(worker, "x") == Scores(values, is_sequence, 1)


def test_arrays_tensors_and_generators_are_sequences() -> None:
    import numpy as np
    import torch

    kinds: dict[str, Callable[[], Any]] = {
        "numpy": lambda: np.array([1.5, 2.0], dtype=np.float32),
        "torch": lambda: torch.tensor([1.5, 2.0]),
        "tuple": lambda: (1.5, np.float64(2)),
        "generator": lambda: (value for value in (1.5, 2.0)),
    }
    with _worker(lambda texts: kinds[texts[0]]()) as worker:
        for kind in kinds:
            assert _call(worker, kind) == Scores([1.5, 2.0], True, 1)


def test_values_that_are_not_finite_come_back_as_they_are() -> None:
    with _worker(lambda _texts: [float("nan"), float("inf"), -float("inf")]) as worker:
        values = _call(worker, "x").values
        assert values[0] != values[0]
        assert values[1:] == [float("inf"), -float("inf")]


def test_large_requests_and_replies() -> None:
    with _worker(lambda texts: [float(len(texts[0]))] * 300_000) as worker:
        outcome = _call(worker, "x" * 30_000_000)
        assert len(outcome.values) == 300_000
        assert outcome.values[0] == 30_000_000


def test_an_interrupted_call_does_not_answer_the_next_one() -> None:
    class _InterruptedError(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise _InterruptedError

    def act(texts: list[str]) -> list[float]:
        time.sleep(0.3 if texts == ["slow"] else 0)
        return [float(len(texts[0]))]

    with _worker(act) as worker:
        previous = signal.signal(signal.SIGUSR1, interrupt)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        try:
            with pytest.raises(_InterruptedError):
                _call(worker, "slow")
        finally:
            signal.signal(signal.SIGUSR1, previous)
            timer.join()
        time.sleep(0.3)
        assert _call(worker, "ok") == Scores([2.0], True, 1)


def test_threads_take_turns() -> None:
    with _worker(_unless(_loop)) as worker:
        results: dict[int, Any] = {}

        def ask(length: int) -> None:
            results[length] = [_call(worker, "x" * length).values for _ in range(20)]

        threads = [threading.Thread(target=ask, args=(length,)) for length in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {length: [[float(length)]] * 20 for length in (1, 2, 3, 4)}


def test_it_works_inside_an_event_loop_with_signal_handlers() -> None:
    async def main() -> Any:
        loop = asyncio.get_running_loop()
        woken: list[int] = []
        loop.add_signal_handler(signal.SIGALRM, lambda: woken.append(1))

        def act(_texts: list[str]) -> list[float]:
            signal.signal(signal.SIGALRM, lambda *_: None)
            os.kill(os.getpid(), signal.SIGALRM)
            return [asyncio.run(_one())]

        with _worker(act) as worker:
            values = await asyncio.to_thread(_call, worker, "x")
        await asyncio.sleep(0.05)
        loop.remove_signal_handler(signal.SIGALRM)
        return values, woken

    assert asyncio.run(main()) == (Scores([1.0], True, 1), [])


async def _one() -> float:
    return 1.0


def test_torch_works_in_a_fork_of_a_process_that_has_used_its_threads() -> None:
    import torch

    torch.set_num_threads(2)
    try:
        (torch.ones(600, 600) @ torch.ones(600, 600)).sum()

        def act(_texts: list[str]) -> list[float]:
            return [float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())]

        with _worker(act) as worker:
            assert _call(worker, "x") == Scores([600.0**3], True, 1)
    finally:
        torch.set_num_threads(1)


def test_ctrl_c_reaches_the_parent_alone() -> None:
    with _worker(_unless(_loop)) as worker:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
        pid = worker.pid
        assert _call(worker, "ok") == Scores([2.0], True, 1)
        assert worker.pid == pid


def test_close_ends_a_worker_and_may_be_called_again() -> None:
    worker = RewardWorker(_Reward(_unless(_loop)))
    pid = worker.pid
    assert pid is not None
    worker.close()
    worker.close()
    assert worker.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_is_let_go_of_ends() -> None:
    worker = RewardWorker(_Reward(_unless(_loop)))
    pid = worker.pid
    assert pid is not None
    del worker
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_row_that_cannot_be_sent_is_named() -> None:
    with _worker(_unless(_loop)) as worker, pytest.raises(DataError, match=r"row=\['act'\]: .* cannot be sent there"):
        worker.call([_input("x", act=lambda: None)], 30)


SCRIPT = """
import sys, time
from ebbtide.rewards.base import RewardInput
from ebbtide.rewards.worker import RewardWorker
from ebbtide.types import StopReason

class Endless:
    def __call__(self, completions):
        while True:
            pass

worker = RewardWorker(Endless())
print(worker.pid, flush=True)
if sys.argv[1] == "exit":
    worker.call([RewardInput("p", "t", {}, 1, StopReason.EOS)], 0.1)
    worker._start()
    print(worker.pid, flush=True)
else:
    worker.call([RewardInput("p", "t", {}, 1, StopReason.EOS)], 1000)
"""


@pytest.mark.parametrize("how", ["exit", "killed"])
def test_no_worker_outlives_its_parent(how: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script), how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline())]
    if how == "killed":
        time.sleep(0.3)  # the worker is in its endless call by now, and does not look at its socket
        parent.kill()
    else:
        pids.append(int(parent.stdout.readline()))
    parent.wait(timeout=30)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids if _is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
