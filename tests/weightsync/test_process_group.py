import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync import CopyInto, NamedTensor, ProcessGroupTransport, SenderOptions, SocketReceiver
from ebbtide.weightsync.process_group import GroupStore
from tests.multiprocess import forked

BUCKET, DEADLINE_S = 4096, 2.0
SHAPES = {"embed": (3000,), "a": (500,), "b": (20, 20)}


def world(rank: int, pushes: int, disturb: Callable[[int, int], None], told: Path) -> list[str]:
    """Rank 0 sends, the others receive; what each push said on this rank."""
    said = []
    if rank == 0:
        sender = ProcessGroupTransport(
            SenderOptions(num_receivers=2, bucket_bytes=BUCKET, deadline_s=DEADLINE_S)
        ).sender
        writing = told.with_suffix(".writing")
        writing.write_text(sender.address, encoding="utf-8")
        writing.rename(told)
        for version in range(pushes):
            weights = [(name, torch.full(shape, float(version))) for name, shape in SHAPES.items()]
            said.append(attempt(partial(sender.send_blocking, weights, version)))
        sender.close_blocking()
        return said
    while not told.exists():
        time.sleep(0.01)
    address = told.read_text(encoding="utf-8")
    targets = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    receiver, consumer = SocketReceiver(address, rank - 1, deadline_s=DEADLINE_S), CopyInto(targets)
    for version in range(pushes):

        def load(weights: Sequence[NamedTensor], version: int = version) -> None:
            disturb(rank, version)
            consumer(weights)

        said.append(attempt(partial(receiver.receive_blocking, load, version)))
        if not said[-1]:
            assert all(bool((tensor == version).all()) for tensor in targets.values())
    receiver.close_blocking()
    return said


def attempt(call: Callable[[], object]) -> str:
    try:
        call()
    except WeightSyncError as error:
        return str(error)
    return ""


def test_two_receivers_get_every_push(tmp_path: Path) -> None:
    said = forked(lambda rank: world(rank, 3, lambda r, v: None, tmp_path / "address"), 3, backend=None)
    assert said == [["", "", ""]] * 3


def test_a_load_that_raises_ends_the_push_everywhere_and_the_next_has_a_new_group(tmp_path: Path) -> None:
    def disturb(rank: int, version: int) -> None:
        if (rank, version) == (2, 1):
            raise ValueError("no such layer")

    said = forked(lambda rank: world(rank, 3, disturb, tmp_path / "address"), 3, backend=None)
    for of_rank in said:
        assert of_rank[0] == of_rank[2] == ""
        assert "no such layer" in of_rank[1]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_ends_in_an_error_within_the_deadline(sent: signal.Signals, tmp_path: Path) -> None:
    """The third rank falls in the middle of a push; the others say so, in time, though a collective is under way."""

    def run(rank: int) -> list[str]:
        if rank == 2:
            pid = os.fork()
            if pid == 0:
                world(2, 2, lambda r, v: os.kill(os.getpid(), sent) if v == 1 else None, tmp_path / "address")
                os._exit(0)
            if sent == signal.SIGSTOP:  # it stays stopped for longer than the others wait
                time.sleep(2 * DEADLINE_S + 1)
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return []
        start = time.monotonic()
        said = world(rank, 2, lambda r, v: None, tmp_path / "address")
        return [*said, str(time.monotonic() - start)]

    sender, receiver, _ = forked(run, 3, backend=None)
    for said in (sender, receiver):
        assert said[0] == ""
        assert said[1] != ""
        assert float(said[2]) < 2 * DEADLINE_S + 3
    if sent == signal.SIGKILL:
        assert "receiver 1 died" in sender[1]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="must be one of gloo, nccl"):
        GroupStore("127.0.0.1", 2, "mpi", 1.0)


def test_groups_of_their_own_need_no_default_group() -> None:
    assert not torch.distributed.is_initialized()
    transport = ProcessGroupTransport(SenderOptions(bucket_bytes=BUCKET, deadline_s=5))
    receiver = SocketReceiver(transport.address, deadline_s=5)
    targets = {"a": torch.zeros(5)}
    thread = threading.Thread(target=receiver.receive_blocking, args=(CopyInto(targets), 1))
    thread.start()
    transport.sender.send_blocking([("a", torch.ones(5))], 1)
    thread.join(10)
    assert targets["a"].tolist() == [1] * 5
    assert not torch.distributed.is_initialized()
    receiver.close_blocking()
    transport.sender.close_blocking()
