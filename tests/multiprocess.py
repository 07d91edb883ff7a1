"""Ranks for tests: processes forked from this one, which has imported everything, so a group of two starts in 0.2 s."""

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["RankFailedError", "forked"]

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


class RankFailedError(AssertionError):
    """A rank raised, died or outlived the deadline; the message says which, with its traceback."""


def forked(
    fn: Callable[[int], T], world_size: int, timeout_s: float = 60.0, *, backend: str | None = "gloo"
) -> list[T]:
    """Run `fn(rank)` in `world_size` forked processes and return their results in rank order.

    Each rank has one torch thread, the default process group (none with backend None), and a process group of the
    operating system to itself, which is killed at the end with whatever the rank has started.

    Args:
        fn: may be a closure; it is inherited, not pickled. Its result must pickle.
        world_size: number of ranks.
        timeout_s: deadline for all ranks together.
        backend: of torch.distributed.

    Raises:
        RankFailedError: with the traceback of the first rank that failed, or the ranks that are still running.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                arguments = (fn, rank, world_size, Path(folder) / "store", backend, timeout_s, writer)
                process = context.Process(target=_run_rank, args=arguments, name=f"rank {rank}")
                with warnings.catch_warnings():
                    # Python warns of forking beside threads; the ranks run on one thread and take none of their locks.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                writer.close()
                ranks.append((process, reader))
            return _collect(ranks, timeout_s)
        finally:
            _end(ranks)


def _run_rank(
    fn: Callable[[int], T],
    rank: int,
    world_size: int,
    store: Path,
    backend: str | None,
    timeout_s: float,
    writer: Connection,
) -> None:
    # What is garbage in the parent must not be finalised here: a process group waits for its threads, and they stayed.
    gc.freeze()
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    try:
        if backend is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                backend,
                store=dist.FileStore(str(store), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        result = (True, fn(rank))
        if backend is not None:
            dist.barrier()
        payload = pickle.dumps(result)
    except BaseException:  # noqa: BLE001 this is the edge of a process
        payload = pickle.dumps((False, traceback.format_exc()))
    writer.send_bytes(payload)
    writer.close()
    # Without interpreter shutdown: threads of torch and of the test runner do not survive the fork.
    os._exit(0)


def _collect(ranks: list[tuple[BaseProcess, Connection]], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(ranks):
        waiting = {reader: rank for rank, (_, reader) in enumerate(ranks) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(waiting.values())
            raise RankFailedError(f"ranks {late} of {len(ranks)} have not finished after {timeout_s:g} s")
        for reader in ready:
            assert isinstance(reader, Connection), reader
            rank = waiting[reader]
            try:
                succeeded, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RankFailedError(f"rank {rank} of {len(ranks)} died {_how(ranks[rank][0])}") from None
            if not succeeded:
                raise RankFailedError(f"rank {rank} of {len(ranks)} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def _how(process: BaseProcess) -> str:
    """Its pipe is closed, so it is dead or about to be; it is looked at without being reaped."""
    assert process.pid is not None, process
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert status is not None, process
    if status.si_code == os.CLD_EXITED:
        return f"without a result, with exit code {status.si_status}"
    return f"by {signal.Signals(status.si_status).name}; its last words are in the captured output"


def _end(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    """Kill each rank's process group before its leader is reaped: until then nobody else can have that id."""
    for process, reader in ranks:
        reader.close()
        assert process.pid is not None, process
        for kill in (os.killpg, os.kill):  # a rank that has not called setsid yet leads no group
            try:
                kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.join()
        process.close()
