"""Exact live and peak bytes of tensor storages, on any device, whoever holds them: Python, autograd or C++.

Allocators' statistics exist on accelerators only; this also works on the CPU and on fake tensors. Not seen: scratch
memory that one kernel takes and gives back within one operator, and memory that torch does not own.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)

__all__ = ["LiveStorage", "LiveStorages"]


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """One storage that is alive.

    Attributes:
        nbytes: its size now.
        made_by: the operator that returned it first, such as "aten.mm.default".
        storage: the storage itself; holding on to it keeps the bytes alive.
    """

    nbytes: int
    made_by: str
    storage: torch.UntypedStorage


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operators return while the mode is on, until each dies, even after the mode's exit.

    A view adds nothing, since it shares its base's storage. Storages older than the mode count nothing, except by
    what `resize_` adds to them while it is on. The cost is constant per operator; modes may be nested, and each keeps
    its own count. Tensor subclasses that wrap others (DTensor, nested tensors) are counted by what they wrap.

    Example:
        >>> with LiveStorages() as live:
        ...     a = torch.zeros(256)
        ...     b = a.view(16, 16) * 2
        ...     del a
        >>> live.current_bytes, live.peak_bytes, live.num_created
        (1024, 2048, 2)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_created = 0
        self._current = 0
        self._peak = 0
        self._entries: dict[int, _Entry] = {}
        # Storages may die in any thread and in the middle of any bytecode. An append is atomic; the books are brought
        # up to date at the next operator or reading.
        self._dead: deque[_Entry] = deque()

    @property
    def current_bytes(self) -> int:
        """Bytes alive now."""
        self._settle()
        return self._current

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at the end of an operator, since the start or `reset_peak`."""
        return self._peak

    @property
    def num_live(self) -> int:
        """Storages alive now."""
        self._settle()
        return sum(entry.made_by is not None for entry in self._entries.values())

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self._peak = self.current_bytes

    def live(self) -> list[LiveStorage]:
        """Every counted storage that is alive, the largest first."""
        self._settle()
        found = [(entry, entry()) for entry in self._entries.values() if entry.made_by is not None]
        alive = [LiveStorage(e.nbytes, str(e.made_by), storage) for e, storage in found if storage is not None]
        return sorted(alive, key=lambda item: -item.nbytes)

    def track(self, tensors: Iterable[Tensor], made_by: str) -> None:
        """Count these too, although no operator made them under the mode: parameters, say."""
        self._settle()
        for tensor in tensors:
            for storage in _storages(tensor):
                entry = self._entries.get(storage._cdata)
                if entry is not None and entry.made_by is None:
                    self._retire(entry)
                self._see(storage, made_by)

    def __enter__(self) -> Self:
        _watch_resizes(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _unwatch_resizes(self)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the wrapper unwraps itself first, and the mode sees what runs inside
        kwargs = kwargs or {}
        self._settle()
        if func is not torch.ops.aten.lift_fresh.default:  # its argument is a tensor that torch.tensor() has just made
            for tensor in (*_tensors(args), *_tensors(kwargs.values())):
                for storage in _storages(tensor):
                    self._see(storage, None)
        result = func(*args, **kwargs)
        self._settle()
        for tensor in _tensors((result,)):
            for storage in _storages(tensor):
                self._see(storage, func)
        return result

    def _see(self, storage: torch.UntypedStorage, made_by: Any) -> None:
        """Enter a storage at first sight, its growth at each later one; `made_by` None: older than the mode."""
        entry = self._entries.get(storage._cdata)
        if entry is not None and entry() is not storage:  # the address of one that died in another thread just now
            self._retire(entry)
            entry = None
        nbytes = storage.nbytes()
        if entry is None:
            entry = _Entry(storage, self._dead.append)
            entry.key, entry.made_by, entry.nbytes, entry.is_alive = storage._cdata, made_by, 0, True
            entry.base = nbytes if made_by is None else 0
            self._entries[entry.key] = entry
            self.num_created += made_by is not None
        counted = max(0, nbytes - entry.base)
        self._current += counted - entry.nbytes
        entry.nbytes = counted
        self._peak = max(self._peak, self._current)

    def _settle(self) -> None:
        while self._dead:
            self._retire(self._dead.popleft())

    def _retire(self, entry: "_Entry") -> None:
        if entry.is_alive:
            entry.is_alive = False
            self._current -= entry.nbytes
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]


class _Entry(weakref.ref[torch.UntypedStorage]):
    """The weak reference to a storage, with what is known of it."""

    __slots__ = ("base", "is_alive", "key", "made_by", "nbytes")

    key: int  # the storage's address, which a later storage may have again
    made_by: Any  # the operator, or a text; None where the storage is older than the mode
    base: int  # bytes that are not counted
    nbytes: int  # bytes that are
    is_alive: bool


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    if tensor.layout in _SPARSE_PARTS:
        return [storage for part in _SPARSE_PARTS[tensor.layout] for storage in _storages(getattr(tensor, part)())]
    if is_traceable_wrapper_subclass_type(type(tensor)):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [storage for name in names for storage in _storages(getattr(tensor, name))]
    if tensor.layout is not torch.strided or (tensor.is_meta and not isinstance(tensor, FakeTensor)):
        return []
    return [tensor.untyped_storage()]


_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

# UntypedStorage.resize_ is no operator, so no dispatch mode sees it; FSDP2 frees and refills its gathered parameters by
# it. While any mode is on, the method tells all of them.
_resize_lock = threading.Lock()
_watching: list[LiveStorages] = []
_inherited_resize = torch.UntypedStorage.resize_


def _watch_resizes(mode: LiveStorages) -> None:
    with _resize_lock:
        if not _watching:
            torch.UntypedStorage.resize_ = _watched_resize  # type: ignore[method-assign, assignment]
        _watching.append(mode)


def _unwatch_resizes(mode: LiveStorages) -> None:
    with _resize_lock:
        _watching.remove(mode)
        if not _watching:
            del torch.UntypedStorage.resize_  # the inherited method shows again


def _watched_resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    modes = tuple(dict.fromkeys(_watching))
    for mode in modes:
        mode._see(storage, None)
    _inherited_resize(storage, size)
    for mode in modes:
        mode._see(storage, None)
    return storage
