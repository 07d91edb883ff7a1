"""Weights into buckets and back: layout, slices of weights larger than a bucket, and the checks on arrival.

The bound holds for any weight: one that does not fit is cut, along its flattened elements, over as many buckets as it
needs. A consumer that can take slices says so with `load_slice`; for any other the receiver puts them together in a
tensor of its own, which lives until its `load` returns.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from ebbtide.errors import WeightSyncError, problem
from ebbtide.weightsync.base import Load, NamedTensor
from ebbtide.weightsync.messages import MAX_FRAME_BYTES, MAX_NAME_BYTES, Bucket, Entry

__all__ = ["ALIGNMENT", "DTYPES", "Assembler", "Filler", "LoadsSlices", "dtype_name", "flat_bytes"]

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
"""Every dtype that can travel, by its torch name."""

_ENTRY_BYTES = 128  # of a frame, beside the name: more than any entry's numbers take
_ENTRIES_LIMIT = MAX_FRAME_BYTES - 4096


@runtime_checkable
class LoadsSlices(Protocol):
    """A consumer that takes a large weight piece by piece, so that the whole of it need not exist a second time."""

    def __call__(self, weights: Sequence[NamedTensor]) -> None:
        """Take whole weights."""
        ...

    def load_slice(self, name: str, shape: tuple[int, ...], start: int, piece: Tensor) -> None:
        """Take elements `start` to `start + len(piece)` of the flattened weight; slices come in order.

        Args:
            name: of the weight.
            shape: of the whole weight.
            start: the first element.
            piece: [n], a view that is valid until this returns.
        """
        ...


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as the frames name it.

    Example:
        >>> dtype_name(torch.float8_e4m3fn)
        'float8_e4m3fn'
    """
    return str(dtype).removeprefix("torch.")


def flat_bytes(tensor: Tensor) -> Tensor:
    """[nbytes] uint8, the elements of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(slots=True)
class _Pending:
    """A weight of which `start` elements are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    flat: Tensor
    start: int = 0

    @property
    def rest(self) -> int:
        return self.flat.numel() - self.start


class Filler:
    """Draws weights one at a time and lays them into buckets.

    Args:
        weights: read once; the next is drawn when the one before is written.
        bucket_bytes: of one half-buffer.
    """

    def __init__(self, weights: Iterable[NamedTensor], bucket_bytes: int) -> None:
        self._weights = iter(weights)
        self._bucket_bytes = bucket_bytes
        self._names: set[str] = set()
        self._pending: _Pending | None = None
        self.num_bytes = 0
        """Payload written so far."""

    @property
    def num_tensors(self) -> int:
        """Weights begun so far."""
        return len(self._names)

    def fill(self, write: Callable[[int, Tensor], None]) -> tuple[tuple[Entry, ...], int, bool]:
        """Write the next bucket.

        Args:
            write: puts a flat contiguous tensor at an offset, in bytes, of the bucket.

        Returns:
            The entries, the bytes used from the bucket's start, and whether no weight is left.

        Raises:
            WeightSyncError: a weight that cannot travel, or a name that came before.
        """
        entries: list[Entry] = []
        used = frame_bytes = 0
        while (pending := self._peek()) is not None:
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            count = self._count_that_fits(pending, offset)
            frame_bytes += _ENTRY_BYTES + 9 * len(pending.shape) + len(pending.name.encode())
            if count is None or (entries and frame_bytes > _ENTRIES_LIMIT):
                break
            piece = pending.flat[pending.start : pending.start + count]
            write(offset, piece)
            entries.append(Entry(pending.name, pending.dtype, pending.shape, offset, pending.start, count))
            pending.start += count
            used = offset + piece.nbytes
            self.num_bytes += piece.nbytes
            if not pending.rest:
                self._pending = None
            del pending, piece
        return tuple(entries), used, self._peek() is None

    def close(self) -> None:
        """Let go of the weight at hand, and of the iterator."""
        self._pending = None
        self._weights = iter(())

    def _count_that_fits(self, pending: _Pending, offset: int) -> int | None:
        itemsize = pending.flat.element_size()
        room = max(0, self._bucket_bytes - offset) // itemsize
        if pending.rest <= room:
            return pending.rest
        is_oversized = pending.flat.nbytes > self._bucket_bytes
        return room if is_oversized and room else None

    def _peek(self) -> _Pending | None:
        if self._pending is None:
            item = next(self._weights, None)
            if item is not None:
                self._pending = self._accept(*item)
        return self._pending

    def _accept(self, name: str, tensor: Tensor) -> _Pending:
        if name in self._names:
            raise WeightSyncError(problem("weight", name, "came twice in one push", "Give each weight once"))
        if len(name.encode()) > MAX_NAME_BYTES:
            raise WeightSyncError(problem("weight", name, f"a name has at most {MAX_NAME_BYTES} bytes"))
        tensor = tensor.detach()
        if type(tensor) is not Tensor:
            rule = f"is a {type(tensor).__name__}, and only plain tensors travel"
            raise WeightSyncError(problem("weight", name, rule, "Gather it before it is pushed"))
        if tensor.layout is not torch.strided or tensor.is_meta or dtype_name(tensor.dtype) not in DTYPES:
            rule = f"{tensor.layout} {tensor.dtype} on {tensor.device} has no plain bytes"
            raise WeightSyncError(problem("weight", name, rule, "Push a dense tensor of an ordinary dtype"))
        self._names.add(name)
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _Pending(name, dtype_name(tensor.dtype), tuple(tensor.shape), flat)


class Assembler:
    """Hands arriving buckets to a consumer, whole weights in one call a bucket.

    Args:
        load: the consumer.
        bucket_bytes: the plan's, against which entries are checked.
    """

    def __init__(self, load: Load, bucket_bytes: int) -> None:
        self._load = load
        self._bucket_bytes = bucket_bytes
        self._open: Entry | None = None  # the last slice of a weight that is not complete
        self._whole: Tensor | None = None  # where its slices are put together

    def check(self, bucket: Bucket) -> None:
        """That every entry lies inside the bucket, and slices follow one another.

        Raises:
            WeightSyncError: they do not.
        """
        if bucket.num_bytes > self._bucket_bytes:
            _refuse(bucket.index, f"has {bucket.num_bytes} bytes, the plan allows {self._bucket_bytes}")
        last = self._open
        for entry in bucket.entries:
            dtype = DTYPES.get(entry.dtype)
            if dtype is None:
                _refuse(bucket.index, f"{entry.name!r} has an unknown dtype {entry.dtype!r}")
            stop = entry.offset_bytes + entry.count * dtype.itemsize
            if stop > bucket.num_bytes or entry.offset_bytes % dtype.itemsize:
                _refuse(bucket.index, f"{entry.name!r} does not lie inside it")
            if not _follows(last, entry):
                _refuse(bucket.index, f"{entry.name!r} starts at element {entry.start}, out of turn")
            last = entry if entry.start + entry.count < math.prod(entry.shape) else None
        if bucket.is_last and last is not None:
            _refuse(bucket.index, f"is the last, and {last.name!r} is not complete")

    def take(self, entries: Sequence[Entry], view: Callable[[Entry], Tensor]) -> None:
        """Load the weights of a bucket; on return this object holds no view.

        Args:
            entries: checked before.
            view: [count] of an entry, flat.
        """
        ready: list[NamedTensor] = []
        for entry in entries:
            if entry.count == math.prod(entry.shape):
                ready.append((entry.name, view(entry).view(entry.shape)))
            elif isinstance(self._load, LoadsSlices):
                self._load.load_slice(entry.name, entry.shape, entry.start, view(entry))
            elif (whole := self._put_together(entry, view(entry))) is not None:
                ready.append((entry.name, whole))
            is_open = entry.start + entry.count < math.prod(entry.shape)
            self._open = entry if is_open else None
        if ready:
            self._load(ready)

    def _put_together(self, entry: Entry, piece: Tensor) -> Tensor | None:
        if entry.start == 0:
            self._whole = torch.empty(math.prod(entry.shape), dtype=piece.dtype, device=piece.device)
        assert self._whole is not None
        self._whole[entry.start : entry.start + entry.count].copy_(piece)
        if entry.start + entry.count < self._whole.numel():
            return None
        whole, self._whole = self._whole, None
        return whole.view(entry.shape)


def _follows(last: Entry | None, entry: Entry) -> bool:
    """Whether an entry is whole or a first slice, or the next slice of the weight that is not complete."""
    if entry.start + entry.count > math.prod(entry.shape):
        return False
    if last is None:
        return entry.start == 0
    return (entry.name, entry.dtype, entry.shape, entry.start) == (
        last.name,
        last.dtype,
        last.shape,
        last.start + last.count,
    )


def _refuse(index: int, rule: str) -> NoReturn:
    raise WeightSyncError(problem("bucket", index, rule))
