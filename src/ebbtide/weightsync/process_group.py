"""Broadcast to rollouts on other nodes, over gloo or NCCL; the frames go over TCP, as they do over a Unix socket.

The group is made with the first push and kept; a failed push ends its generation, since after a lost rank no
collective can be trusted. Every collective has a deadline: a dead or stopped rank ends in an error, not in a wait.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ebbtide.errors import WeightSyncError, problem
from ebbtide.weightsync import accelerator
from ebbtide.weightsync.buckets import flat_bytes
from ebbtide.weightsync.machine.sender_state import NUM_HALVES
from ebbtide.weightsync.messages import Entry, GroupHandle
from ebbtide.weightsync.views import HostViews, StorageViews, Views

__all__ = ["BACKENDS", "GroupBuffer", "GroupMapping", "GroupStore"]

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""Each with the kind of device that its buffers live on."""

_POISON = 0xFF
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.002


class _Group(Protocol):
    """What the backends' own classes have in common; torch's stubs do not say it."""

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...

    def abort(self) -> None: ...


class GroupStore:
    """Where the ranks of a group find each other; lives as long as its sender.

    Args:
        host: of the sender, as receivers reach it.
        world_size: the sender and its receivers.
        backend: gloo or nccl.
        deadline_s: of every collective.
    """

    def __init__(self, host: str, world_size: int, backend: str, deadline_s: float) -> None:
        if backend not in BACKENDS:
            raise WeightSyncError(problem("weightsync.backend", backend, f"must be one of {', '.join(BACKENDS)}"))
        self.world_size, self.backend, self.deadline_s = world_size, backend, deadline_s
        self._host = host
        timeout = timedelta(seconds=deadline_s)
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)

    def handle(self, generation: int) -> GroupHandle:
        """What a receiver needs to join a generation of the group."""
        return GroupHandle(self._host, self.store.port, generation, self.world_size, self.backend)


class GroupBuffer:
    """The sender's end, rank 0 of the group.

    Args:
        bucket_bytes: of one half.
        generation: of the group.
        store: where it is made.
    """

    def __init__(self, bucket_bytes: int, generation: int, store: GroupStore) -> None:
        self._bucket_bytes = bucket_bytes
        self._generation = generation
        self._store = store
        self._group: _Group | None = None
        self._bytes = torch.empty(NUM_HALVES * bucket_bytes, dtype=torch.uint8, device=BACKENDS[store.backend])
        self.descriptors: tuple[int, ...] = ()

    def export(self) -> GroupHandle:
        """The group to join."""
        return self._store.handle(self._generation)

    def meet(self) -> None:
        """Join with all receivers, who have been told to."""
        store = self._store
        self._group = _join(store.store, self._generation, 0, store.world_size, store.backend, store.deadline_s)

    def write(self, half: int, offset: int, source: Tensor) -> None:
        """From whatever device the source is on."""
        if source.numel():
            start = half * self._bucket_bytes + offset
            self._bytes[start : start + source.nbytes].copy_(flat_bytes(source))

    def synchronize(self) -> None:
        """Every write has landed."""
        accelerator.synchronize()

    def payload(self, half: int, num_bytes: int) -> memoryview:
        """[num_bytes], copied to the host where it is not there."""
        start = half * self._bucket_bytes
        return self._bytes[start : start + num_bytes].cpu().numpy().data

    def deliver(self, half: int, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Broadcast the bucket's bytes."""
        assert self._group is not None
        start = half * self._bucket_bytes
        _broadcast(self._group, self._bytes[start : start + num_bytes], self._store.deadline_s, is_over)

    def poison(self, half: int) -> None:
        """All bits set; receivers have copies of their own, so this shows the sender's own mistakes only."""
        self._bytes[half * self._bucket_bytes : (half + 1) * self._bucket_bytes].fill_(_POISON)

    def free(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abort()
            self._group = None


class GroupMapping:
    """A receiver's end: a pair of halves of its own, filled by the broadcasts.

    Args:
        handle: from the plan.
        bucket_bytes: of one half, from the plan.
        rank: of the receiver; the sender is rank 0 of the group.
        deadline_s: of every collective.
    """

    def __init__(self, handle: GroupHandle, bucket_bytes: int, rank: int, deadline_s: float) -> None:
        if handle.backend not in BACKENDS:
            raise WeightSyncError(problem("plan.backend", handle.backend, f"must be one of {', '.join(BACKENDS)}"))
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._bytes = torch.empty(NUM_HALVES * bucket_bytes, dtype=torch.uint8, device=BACKENDS[handle.backend])
        is_host = self._bytes.device.type == "cpu"
        self._views: Views = HostViews(self._bytes.numpy().data) if is_host else StorageViews(self._bytes)
        timeout = timedelta(seconds=deadline_s)
        store = dist.TCPStore(handle.host, handle.port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._group: _Group | None = _join(
            store, handle.generation, rank + 1, handle.world_size, handle.backend, deadline_s
        )

    def collect(self, half: int, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Take part in the broadcast."""
        assert self._group is not None
        start = half * self._bucket_bytes
        _broadcast(self._group, self._bytes[start : start + num_bytes], self._deadline_s, is_over)

    def payload(self, half: int, num_bytes: int) -> memoryview:
        """[num_bytes], copied to the host where it is not there."""
        start = half * self._bucket_bytes
        return self._bytes[start : start + num_bytes].cpu().numpy().data

    def view(self, half: int, entry: Entry, dtype: torch.dtype) -> Tensor:
        """[count] of a half."""
        return self._views.give(entry.name, half * self._bucket_bytes + entry.offset_bytes, entry.count, dtype)

    def synchronize(self) -> None:
        """All that reads the views is done."""
        accelerator.synchronize()

    def kept(self) -> Sequence[str]:
        """The weights of which a view is alive."""
        return self._views.kept()

    def close(self) -> bool:
        """Leave the group; the memory is this side's own and goes with the last view."""
        if self.kept():
            return False
        if self._group is not None:
            self._group.abort()
            self._group = None
        return True


def _join(store: dist.Store, generation: int, rank: int, world_size: int, backend: str, deadline_s: float) -> "_Group":
    """A group of its own, beside whatever groups the process has."""
    prefix = dist.PrefixStore(f"ebbtide-push/{generation}", store)
    timeout = timedelta(seconds=deadline_s)
    if backend == "gloo":
        return cast(_Group, dist.ProcessGroupGloo(prefix, rank, world_size, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(_Group, dist.ProcessGroupNCCL(prefix, rank, world_size, options))


def _broadcast(group: "_Group", tensor: Tensor, deadline_s: float, is_over: Callable[[], bool]) -> None:
    """From rank 0, within the deadline, and no longer than the push lasts.

    Polled: a collective's own wait hears nothing of the frames that say why no bytes will come, and NCCL's returns
    when the work is queued and leaves the rest to a watchdog that would end the process.

    Raises:
        WeightSyncError: some rank is gone, or was silent beyond the deadline.
    """
    if not tensor.numel():
        return
    limit, pause_s = time.monotonic() + deadline_s, _SHORTEST_PAUSE_S
    try:
        work = group.broadcast(tensor, 0)
        while not work.is_completed():
            if is_over() or time.monotonic() > limit:
                group.abort()
                raise WeightSyncError(problem("broadcast", tensor.nbytes, f"did not end within {deadline_s:g} s"))
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        work.wait()
    except RuntimeError as error:
        if isinstance(error, WeightSyncError):
            raise
        first = str(error).splitlines()[0].encode("ascii", "replace").decode()
        raise WeightSyncError(problem("broadcast", tensor.nbytes, f"failed on some rank: {first}")) from error
