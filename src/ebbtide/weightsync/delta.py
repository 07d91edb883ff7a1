"""Push only what changed: the sender remembers a digest of each weight of the last push, not the weight."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from ebbtide.weightsync.base import NamedTensor
from ebbtide.weightsync.buckets import dtype_name, flat_bytes
from ebbtide.weightsync.digests import tensor_digest

__all__ = ["ChangeFilter"]


class ChangeFilter:
    """Which weights differ, bit for bit, from those of the last push that every receiver completed."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._seen: dict[str, bytes] = {}
        self._base: int | None = None

    @property
    def base(self) -> int | None:
        """The version of the last complete push; None before the first."""
        return self._base

    def select(self, weights: Iterable[NamedTensor], *, is_full: bool) -> Iterator[NamedTensor]:
        """The weights to send, all of them where `is_full`; every one is read, since only its bytes tell."""
        self._seen = {}
        for name, tensor in weights:
            seen = _digest_of(tensor.detach())
            self._seen[name] = seen
            if is_full or self._known.get(name) != seen:
                yield name, tensor
            del tensor

    def commit(self, version: int) -> None:
        """The push has arrived everywhere; the next compares with it."""
        self._known.update(self._seen)
        self._seen = {}
        self._base = version

    def abort(self) -> None:
        """The push broke off; the next compares with the one before."""
        self._seen = {}


def _digest_of(tensor: Tensor) -> bytes:
    payload = flat_bytes(tensor.cpu().contiguous()).numpy().data
    return tensor_digest(payload, f"{dtype_name(tensor.dtype)}{tuple(tensor.shape)}")
