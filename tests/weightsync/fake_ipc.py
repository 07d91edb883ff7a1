"""A stand-in for the driver's IPC calls, in one process, that counts references as CUDA does, limbo included."""

import weakref

import numpy as np
import torch
from torch import Tensor

from ebbtide.weightsync.cuda_ipc import CudaMapping
from ebbtide.weightsync.medium import Mapping
from ebbtide.weightsync.messages import CudaHandle, Plan

__all__ = ["FakeIpc"]


class FakeIpc:
    """Memory by number; a handle counts as a user until what was opened with it is gone.

    Attributes:
        counts_at_free: users of each buffer at the moment when its owner let it go.
        limbo: buffers let go with users left, and their bytes; only `collect` takes them out.
        num_synchronized: calls of `synchronize`.
    """

    def __init__(self) -> None:
        self.counts_at_free: list[int] = []
        self.limbo: dict[int, int] = {}
        self.num_synchronized = 0
        self._memory: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        self._users: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> Tensor:
        key = len(self._memory)
        self._memory[key] = np.zeros(num_bytes, dtype=np.uint8)
        self._users[key] = 0
        place = self._memory[key].data[:]
        weakref.finalize(place, self._freed, key)
        tensor = torch.frombuffer(place, dtype=torch.uint8)
        tensor.key = key  # type: ignore[attr-defined]
        return tensor

    def export(self, buffer: Tensor) -> CudaHandle:
        key: int = buffer.key  # type: ignore[attr-defined]
        self._users[key] += 1
        return CudaHandle("GPU-0", key.to_bytes(8, "little"), buffer.numel(), 0, b"", 0, b"", False)

    def open(self, handle: CudaHandle) -> Tensor:
        key = int.from_bytes(handle.handle, "little")
        place = self._memory[key].data[:]
        weakref.finalize(place, self._closed, key)
        return torch.frombuffer(place, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.num_synchronized += 1

    def collect(self) -> None:
        for key in [key for key in self.limbo if not self._users[key]]:
            del self.limbo[key]

    def open_buffer(self, plan: Plan, rank: int, descriptors: object, deadline_s: float) -> Mapping:
        assert isinstance(plan.buffer, CudaHandle)
        return CudaMapping(plan.buffer, plan.bucket_bytes, _ReceiversCalls(self))

    def _closed(self, key: int) -> None:
        self._users[key] -= 1

    def _freed(self, key: int) -> None:
        self.counts_at_free.append(self._users[key])
        if self._users[key]:
            self.limbo[key] = self._memory[key].nbytes


class _ReceiversCalls:
    """The same calls from the receiver's process, whose collection knows nothing of the sender's limbo."""

    def __init__(self, senders: FakeIpc) -> None:
        self.allocate, self.export = senders.allocate, senders.export
        self.open, self.synchronize = senders.open, senders.synchronize

    def collect(self) -> None:
        pass
