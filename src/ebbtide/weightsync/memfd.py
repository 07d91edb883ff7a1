"""Host memory shared by the processes of one machine: `memfd_create`, which has no name that could be left behind.

The descriptor travels over the socket with the plan. Sealed against resizing, so that no peer can pull the memory
from under a reader.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ebbtide.errors import WeightSyncError, problem
from ebbtide.weightsync import accelerator
from ebbtide.weightsync.buckets import flat_bytes
from ebbtide.weightsync.machine.sender_state import NUM_HALVES
from ebbtide.weightsync.messages import Entry, MemfdHandle
from ebbtide.weightsync.views import HostViews

__all__ = ["MemfdBuffer", "MemfdMapping"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POISON = 0xFF  # NaN in float16, bfloat16, float32, float64 and both float8 families with a NaN at all ones


class MemfdBuffer:
    """The sender's end.

    Args:
        bucket_bytes: of one half.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._fd = os.memfd_create("ebbtide-push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, NUM_HALVES * bucket_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self._fd, NUM_HALVES * bucket_bytes)
        self._bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(self._map, dtype=np.uint8)

    def export(self) -> MemfdHandle:
        """Its size; the descriptor goes beside it."""
        return MemfdHandle(NUM_HALVES * self._bucket_bytes)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The memory's descriptor."""
        return (self._fd,)

    def meet(self) -> None:
        """Nothing: mapping needs no second side."""

    def write(self, half: int, offset: int, source: Tensor) -> None:
        """One thread copies: two would fight the receiver's for the same cores."""
        if not source.numel():
            return
        assert self._bytes is not None
        start = half * self._bucket_bytes + offset
        place = self._bytes[start : start + source.nbytes]
        if source.device.type == "cpu":
            np.copyto(place, flat_bytes(source).numpy())
        else:
            torch.from_numpy(place).copy_(flat_bytes(source))

    def synchronize(self) -> None:
        """Nothing: a copy to pageable host memory has landed when it returns."""

    def payload(self, half: int, num_bytes: int) -> memoryview:
        """[num_bytes] of a half."""
        assert self._bytes is not None
        start = half * self._bucket_bytes
        return self._bytes[start : start + num_bytes].data

    def deliver(self, half: int, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Nothing: the memory is shared."""

    def poison(self, half: int) -> None:
        """All bits set."""
        assert self._bytes is not None
        self._bytes[half * self._bucket_bytes : (half + 1) * self._bucket_bytes] = _POISON

    def free(self) -> None:
        """Unmap and close; the kernel frees the memory with its last mapping."""
        self._bytes = None
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemfdMapping:
    """A receiver's end.

    Args:
        handle: from the plan.
        bucket_bytes: of one half, from the plan.
        descriptors: that came with the plan; closed here.

    Raises:
        WeightSyncError: no descriptor came, or its memory is not as the plan says.
    """

    def __init__(self, handle: MemfdHandle, bucket_bytes: int, descriptors: Sequence[int]) -> None:
        if len(descriptors) != 1:
            raise WeightSyncError(problem("plan.descriptors", len(descriptors), "exactly one comes with a memfd"))
        (fd,) = descriptors
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if os.fstat(fd).st_size != handle.num_bytes or handle.num_bytes != NUM_HALVES * bucket_bytes or not is_sealed:
            raise WeightSyncError(problem("plan.buffer", handle.num_bytes, "its memory has another size, or no seal"))
        self._bucket_bytes = bucket_bytes
        self._map = mmap.mmap(fd, handle.num_bytes)
        self._views = HostViews(self._map)

    def collect(self, half: int, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Nothing: the memory is shared."""

    def payload(self, half: int, num_bytes: int) -> memoryview:
        """[num_bytes] of a half."""
        start = half * self._bucket_bytes
        return memoryview(self._map)[start : start + num_bytes]

    def view(self, half: int, entry: Entry, dtype: torch.dtype) -> Tensor:
        """[count] of a half."""
        return self._views.give(entry.name, half * self._bucket_bytes + entry.offset_bytes, entry.count, dtype)

    def synchronize(self) -> None:
        """A consumer may have queued copies from the views to its device."""
        accelerator.synchronize()

    def kept(self) -> list[str]:
        """The weights of which a view is alive."""
        return self._views.kept()

    def close(self) -> bool:
        """Unmap; False where views are alive."""
        if self.kept():
            return False
        try:
            self._map.close()
        except BufferError:
            return False
        return True
