"""Device memory shared between processes of one machine, by the storage's IPC handle as plain fields.

PyTorch counts, in memory that both processes share, who has a storage open. A sender that frees its storage while the
count is above zero does not get the memory back: the block goes to a limbo from which only a later collection, after
the count has fallen, takes it. So the sender frees after every receiver has closed, and the limbo stays empty.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ebbtide.errors import WeightSyncError, problem
from ebbtide.weightsync.buckets import flat_bytes
from ebbtide.weightsync.machine.sender_state import NUM_HALVES
from ebbtide.weightsync.messages import CudaHandle, Entry
from ebbtide.weightsync.views import StorageViews

__all__ = ["DEVICE_BUCKET_BYTES", "CudaBuffer", "CudaMapping", "IpcCalls", "TorchCalls"]

DEVICE_BUCKET_BYTES = 256 << 20
"""For device memory: large copies hide the two sides' turns, and a pair of halves is small beside a model."""

_POISON = 0xFF


class IpcCalls(Protocol):
    """The calls to the driver that this medium makes."""

    def allocate(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 that can be exported."""
        ...

    def export(self, buffer: Tensor) -> CudaHandle:
        """A handle for one receiver, which counts as one user until that receiver has closed it."""
        ...

    def open(self, handle: CudaHandle) -> Tensor:
        """[num_bytes] uint8, the sender's memory."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def collect(self) -> None:
        """Let the driver's bookkeeping take back what nobody uses any more."""
        ...


class TorchCalls:
    """The real ones.

    Args:
        device: of this process, on which the sender allocates; the current one where None.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def allocate(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 from the caching allocator."""
        device = self._device or torch.device("cuda", torch.cuda.current_device())
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def export(self, buffer: Tensor) -> CudaHandle:
        """The storage's handle; the device is named by UUID, because processes may number devices differently."""
        shared = buffer.untyped_storage()._share_cuda_()
        _, handle, num_bytes, offset_bytes, ref_counter, ref_counter_offset, event, must_wait = shared
        return CudaHandle(
            device_uuid=str(torch.cuda.get_device_properties(buffer.device).uuid),
            handle=handle,
            num_bytes=num_bytes,
            offset_bytes=offset_bytes,
            ref_counter=ref_counter,
            ref_counter_offset=ref_counter_offset,
            event=event,
            must_wait_for_event=must_wait,
        )

    def open(self, handle: CudaHandle) -> Tensor:
        """The sender's storage, on this process's device of that UUID.

        Raises:
            WeightSyncError: this process sees no such device.
        """
        index = _index_of(handle.device_uuid)
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(
            index,
            handle.handle,
            handle.num_bytes,
            handle.offset_bytes,
            handle.ref_counter,
            handle.ref_counter_offset,
            handle.event,
            handle.must_wait_for_event,
        )
        opened = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
        return opened.set_(storage, 0, (handle.num_bytes,), (1,))

    def synchronize(self) -> None:
        """The whole device: weights may come from, and be loaded on, any stream."""
        torch.cuda.synchronize(self._device)

    def collect(self) -> None:
        """Drains the entries whose count is zero."""
        torch.cuda.ipc_collect()


class CudaBuffer:
    """The sender's end.

    Args:
        bucket_bytes: of one half.
        calls: to the driver.
    """

    def __init__(self, bucket_bytes: int, calls: IpcCalls) -> None:
        self._bucket_bytes = bucket_bytes
        self._calls = calls
        self._bytes: Tensor | None = calls.allocate(NUM_HALVES * bucket_bytes)
        self.descriptors: tuple[int, ...] = ()

    def export(self) -> CudaHandle:
        """One for each receiver."""
        assert self._bytes is not None
        return self._calls.export(self._bytes)

    def meet(self) -> None:
        """Nothing: opening needs no second side."""

    def write(self, half: int, offset: int, source: Tensor) -> None:
        """From whatever device the source is on, queued on this thread's stream."""
        if source.numel():
            assert self._bytes is not None
            start = half * self._bucket_bytes + offset
            self._bytes[start : start + source.nbytes].copy_(flat_bytes(source), non_blocking=True)

    def synchronize(self) -> None:
        """Every write has landed."""
        self._calls.synchronize()

    def payload(self, half: int, num_bytes: int) -> memoryview:
        """[num_bytes], copied to the host."""
        assert self._bytes is not None
        return _to_host(self._bytes, half * self._bucket_bytes, num_bytes)

    def deliver(self, half: int, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Nothing: the memory is shared."""

    def poison(self, half: int) -> None:
        """All bits set."""
        assert self._bytes is not None
        self._bytes[half * self._bucket_bytes : (half + 1) * self._bucket_bytes].fill_(_POISON)
        self._calls.synchronize()

    def free(self) -> None:
        """Back to the caching allocator; `Device.empty_cache` hands it to the driver."""
        self._bytes = None
        self._calls.collect()


class CudaMapping:
    """A receiver's end.

    Args:
        handle: from the plan.
        bucket_bytes: of one half, from the plan.
        calls: to the driver.

    Raises:
        WeightSyncError: no such device here, or the memory is not as the plan says.
    """

    def __init__(self, handle: CudaHandle, bucket_bytes: int, calls: IpcCalls | None = None) -> None:
        self._calls = calls or TorchCalls()
        self._bucket_bytes = bucket_bytes
        base = self._calls.open(handle)
        if base.numel() != NUM_HALVES * bucket_bytes:
            raise WeightSyncError(problem("plan.buffer", base.numel(), "its memory has another size"))
        self._bytes: Tensor | None = base
        self._views = StorageViews(base)

    def collect(self, half: int, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Nothing: the memory is shared."""

    def payload(self, half: int, num_bytes: int) -> memoryview:
        """[num_bytes], copied to the host."""
        assert self._bytes is not None
        return _to_host(self._bytes, half * self._bucket_bytes, num_bytes)

    def view(self, half: int, entry: Entry, dtype: torch.dtype) -> Tensor:
        """[count] of a half."""
        return self._views.give(entry.name, half * self._bucket_bytes + entry.offset_bytes, entry.count, dtype)

    def synchronize(self) -> None:
        """All that reads the views is done."""
        self._calls.synchronize()

    def kept(self) -> Sequence[str]:
        """The weights of which a view is alive."""
        return self._views.kept() if self._bytes is not None else []

    def close(self) -> bool:
        """Give up the storage, whose end lowers the count that the sender's driver looks at."""
        if self.kept():
            return False
        if self._bytes is not None:
            self._calls.synchronize()
            del self._bytes, self._views
            self._bytes = None
            self._calls.collect()
        return True


def _to_host(base: Tensor, start: int, num_bytes: int) -> memoryview:
    return base[start : start + num_bytes].cpu().numpy().data


def _index_of(uuid: str) -> int:
    here = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in here:
        rule = f"this process sees {len(here)} devices, and not that one"
        raise WeightSyncError(problem("plan.device", uuid, rule, "Let trainer and rollout see the same device"))
    return here.index(uuid)
