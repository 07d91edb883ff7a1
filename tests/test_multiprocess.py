import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess import RankFailedError, forked


def test_ranks_reduce_and_return_in_order() -> None:
    (torch.randn(300, 300, requires_grad=True) @ torch.randn(300, 300)).sum().backward()

    def run(rank: int) -> torch.Tensor:
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value)
        return value + rank

    assert torch.cat(forked(run, 3)).tolist() == [6.0, 7.0, 8.0]


def test_a_large_result_passes() -> None:
    results = forked(lambda rank: torch.full((1 << 20,), rank), 2, backend=None)
    assert [int(result.sum()) for result in results] == [0, 1 << 20]


def test_an_error_carries_rank_and_traceback_and_ends_the_others() -> None:
    def run(rank: int) -> None:
        if rank == 1:
            raise KeyError("here it is")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 of 2 raised.*in run.*KeyError: 'here it is'"):
        forked(run, 2)
    assert time.monotonic() - start < 30


def test_a_dead_rank_is_seen() -> None:
    with pytest.raises(RankFailedError, match="rank 0 of 1 died without a result, with exit code 3"):
        forked(lambda rank: os._exit(3), 1)
    with pytest.raises(RankFailedError, match="rank 1 of 2 died by SIGKILL"):
        forked(lambda rank: os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60), 2, backend=None)


def test_a_deadline_ends_ranks_and_what_they_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def run(rank: int) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pid_file.write_text(str(child.pid))
        child.wait()

    with pytest.raises(RankFailedError, match=r"ranks \[0\] of 1 have not finished after 1 s"):
        forked(run, 1, timeout_s=1.0, backend=None)
    deadline = time.monotonic() + 5
    while _runs(int(pid_file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(int(pid_file.read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
