"""What a medium does for a push: hold two half-buffers that both sides can reach. One file implements each."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ebbtide.weightsync.messages import BufferHandle, Entry

__all__ = ["Mapping", "SendBuffer"]


class SendBuffer(Protocol):
    """The sender's end; lives from the first plan that hands it over until nobody has it mapped."""

    def export(self) -> BufferHandle:
        """What one receiver needs to map it; asked for once for each, since some media count."""
        ...

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that go with the handle."""
        ...

    def meet(self) -> None:
        """After a plan went out with the handle: wait for the receivers where mapping takes both sides."""
        ...

    def write(self, half: int, offset: int, source: Tensor) -> None:
        """Copy a flat contiguous tensor, on any device, to `offset` bytes of a half."""
        ...

    def synchronize(self) -> None:
        """Return when every write has landed."""
        ...

    def payload(self, half: int, num_bytes: int) -> memoryview:
        """The first bytes of a half in host memory, for a digest."""
        ...

    def deliver(self, half: int, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """After a bucket was announced: move its bytes where the medium is not shared memory; stop where `is_over`."""
        ...

    def poison(self, half: int) -> None:
        """Overwrite a half with bytes that read as NaN in every floating dtype."""
        ...

    def free(self) -> None:
        """Give the memory back."""
        ...


class Mapping(Protocol):
    """A receiver's end."""

    def collect(self, half: int, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """After a bucket was announced: take its bytes where the medium is not shared memory; stop where `is_over`."""
        ...

    def payload(self, half: int, num_bytes: int) -> memoryview:
        """The first bytes of a half in host memory, for a digest."""
        ...

    def view(self, half: int, entry: Entry, dtype: torch.dtype) -> Tensor:
        """[count] of a half; counted until the last tensor that shares its storage is gone."""
        ...

    def synchronize(self) -> None:
        """Return when the device has done all that reads the views."""
        ...

    def kept(self) -> Sequence[str]:
        """The weights of which a view is still alive."""
        ...

    def close(self) -> bool:
        """Close the mapping; False where views keep it open."""
        ...
