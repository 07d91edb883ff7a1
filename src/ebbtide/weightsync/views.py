"""Views that are counted: which weights does a consumer still hold a view of, after its `load` has returned."""

import weakref
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import Buffer

__all__ = ["HostViews", "StorageViews", "Views"]


class Views(Protocol):
    """Gives out views of a memory and knows which are alive."""

    def give(self, name: str, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """[count] from `start` bytes, for the weight of this name."""
        ...

    def kept(self) -> list[str]:
        """The weights of which a view is alive; the others are forgotten."""
        ...


class HostViews:
    """Each view has a storage of its own, whose end its memoryview tells, however it was sliced or reshaped.

    Args:
        memory: writable, of plain bytes.
    """

    def __init__(self, memory: Buffer) -> None:
        self._memory = memory
        self._given: list[tuple[str, weakref.ref[memoryview]]] = []

    def give(self, name: str, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """[count] on the CPU."""
        if not count:
            return torch.empty(0, dtype=dtype)
        place = memoryview(self._memory)[start : start + count * dtype.itemsize]
        self._given.append((name, weakref.ref(place)))
        return torch.frombuffer(place, dtype=dtype)

    def kept(self) -> list[str]:
        """Exact for every kind of view."""
        self._given = [(name, place) for name, place in self._given if place() is not None]
        return [name for name, _ in self._given]


class StorageViews:
    """All views share one storage, whose references are counted; a view made from a view is known by its count alone.

    Args:
        base: [num_bytes] uint8, on any device.
    """

    def __init__(self, base: Tensor) -> None:
        self._base = base
        self._num_own = self._num_references()
        self._given: list[tuple[str, weakref.ref[Tensor]]] = []

    def give(self, name: str, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """[count] on the base's device."""
        if not count:
            return torch.empty(0, dtype=dtype, device=self._base.device)
        view = self._base[start : start + count * dtype.itemsize].view(dtype)
        self._given.append((name, weakref.ref(view)))
        return view

    def kept(self) -> list[str]:
        """By name where the tensor given is alive; where only something made from it is, all given last are named."""
        if self._num_references() <= self._num_own:
            self._given.clear()
            return []
        alive = [name for name, view in self._given if view() is not None]
        return alive or [name for name, _ in self._given]

    def _num_references(self) -> int:
        return int(torch._C._storage_Use_Count(self._base.untyped_storage()._cdata))
