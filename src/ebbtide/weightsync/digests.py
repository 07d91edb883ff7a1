"""Checksums of what was sent: one a bucket, and one over them all that names the push on both sides."""

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from ebbtide.weightsync.messages import Entry

__all__ = ["bucket_digest", "chain", "hex_digest", "tensor_digest"]

_ENTRIES = msgspec.msgpack.Encoder()


def bucket_digest(payload: memoryview, entries: Sequence[Entry]) -> int:
    """64 bits over a bucket's bytes and over what they are said to be: names, dtypes, shapes and places.

    Args:
        payload: [num_bytes] uint8, the bucket's bytes from its start, gaps between entries included.
        entries: the weights in it.
    """
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(_ENTRIES.encode(entries)))


def chain(total: int | None, digest: int | None) -> int | None:
    """The digest of a push after one more bucket; None where the push has none.

    Example:
        >>> chain(None, None), chain(chain(None, 1), 2) == chain(chain(None, 2), 1)
        (None, False)
    """
    if digest is None:
        return None
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", total or 0, digest))


def tensor_digest(payload: memoryview, description: str) -> bytes:
    """128 bits over a weight's bytes and its dtype and shape, to tell whether it changed since the last push."""
    return xxhash.xxh3_128_digest(payload, seed=xxhash.xxh3_64_intdigest(description.encode()))


def hex_digest(digest: int | None) -> str:
    """As logs show it.

    Example:
        >>> hex_digest(255), hex_digest(None)
        ('00000000000000ff', 'none')
    """
    return "none" if digest is None else f"{digest:016x}"
