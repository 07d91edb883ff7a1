"""The frames of a push: msgspec structs, msgpack on the wire, checked on arrival; never pickle.

Order of events, one receiver of several:

    sender                                         receiver
                                                <- Hello      once a connection
    Hello                                       ->
                                                <- Ready      it waits for this version, and holds that one
    Plan + the buffer's handle                  ->            the handle only where it is not mapped yet
    Bucket 0, 1, ...                            ->            two half-buffers, bucket i in half i % 2
                                                <- Loaded i   load has returned, the device is idle, no view is alive
                                                <- Released   after the last: only now may the sender reuse the buffer
    Commit                                      ->            every receiver has released: the version counts
    Close   where the buffer is not kept        ->
                                                <- Closed     the mapping is closed: only now may the sender free it
    Failed                                     <->            either side, at any time; the connection ends with it
"""

from typing import Annotated, Literal

import msgspec

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_NAME_BYTES",
    "PROTOCOL",
    "SENDER_RANK",
    "Adapter",
    "Bucket",
    "BufferHandle",
    "Close",
    "Closed",
    "Commit",
    "CudaHandle",
    "Entry",
    "Failed",
    "Frame",
    "GroupHandle",
    "Hello",
    "Loaded",
    "MalformedFrameError",
    "MemfdHandle",
    "Plan",
    "Ready",
    "Released",
    "decode",
    "encode",
]

PROTOCOL = 1
"""Both sides must speak the same; it changes with any frame."""

MAX_FRAME_BYTES = 64 * 1024
"""Two buckets' frames and a plan fit a socket's default buffer, so that a sender never waits in `send`."""

MAX_NAME_BYTES = 4096

SENDER_RANK = -1

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Rank = Annotated[int, msgspec.Meta(ge=SENDER_RANK, le=2**20)]
_Text = Annotated[str, msgspec.Meta(max_length=8192)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]
_Digest = Annotated[int, msgspec.Meta(ge=0)]  # below 2 ** 64, the decoder's own limit
_Shape = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]


class MalformedFrameError(ValueError):
    """Bytes that are no frame of this protocol; only the weight sync's own code sees it."""


class _Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class _Frame(_Part, frozen=True, tag=True):
    pass


class Hello(_Frame, frozen=True):
    """Who is there; `token` proves to a listener on a network port that it was told the address."""

    protocol: int
    run: _Text
    rank: _Rank
    pid: _Count
    token: _Text = ""


class Ready(_Frame, frozen=True):
    """The receiver waits for `version`; its weights are those of `holds`, or torn or unknown where None."""

    version: _Count
    holds: _Count | None


class MemfdHandle(_Frame, frozen=True):
    """Host memory whose descriptor comes with the frame."""

    num_bytes: _Count


class CudaHandle(_Frame, frozen=True):
    """A device storage as torch exports it, field by field; the device is named by UUID, not by number."""

    device_uuid: _Text
    handle: Annotated[bytes, msgspec.Meta(max_length=4096)]
    num_bytes: _Count
    offset_bytes: _Count
    ref_counter: Annotated[bytes, msgspec.Meta(max_length=4096)]
    ref_counter_offset: _Count
    event: Annotated[bytes, msgspec.Meta(max_length=4096)]
    must_wait_for_event: bool


class GroupHandle(_Frame, frozen=True):
    """A process group to join through a store; each failed push makes a new generation of it."""

    host: _Text
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    generation: _Count
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    backend: _Text


BufferHandle = MemfdHandle | CudaHandle | GroupHandle


class Adapter(_Part, frozen=True):
    """A LoRA adapter whose tensors alone are pushed, on top of weights that the receiver has."""

    name: _Name
    rank: Annotated[int, msgspec.Meta(ge=1)]
    alpha: float
    target_modules: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=256)] = ()


class Plan(_Frame, frozen=True):
    """What comes: all weights, only those that changed since `base`, or an adapter's."""

    version: _Count
    kind: Literal["full", "delta", "adapter"]
    base: _Count | None
    bucket_bytes: Annotated[int, msgspec.Meta(ge=64)]
    keeps_buffer: bool
    has_digest: bool
    buffer: BufferHandle | None = None
    adapter: Adapter | None = None


class Entry(_Part, frozen=True):
    """A weight, or a slice of one that is larger than a bucket; `start` and `count` are elements of it, flattened."""

    name: _Name
    dtype: Annotated[str, msgspec.Meta(max_length=64)]
    shape: _Shape
    offset_bytes: _Count
    start: _Count
    count: _Count


class Bucket(_Frame, frozen=True):
    """A filled half-buffer."""

    index: _Count
    entries: tuple[Entry, ...]
    num_bytes: _Count
    is_last: bool
    digest: _Digest | None = None


class Loaded(_Frame, frozen=True):
    """`load` has returned for this bucket, the device is idle and no view of it is alive."""

    index: _Count


class Released(_Frame, frozen=True):
    """Everything is loaded and let go; `digest` is over all buckets' digests."""

    version: _Count
    digest: _Digest | None


class Commit(_Frame, frozen=True):
    """Every receiver has released this version; it may be generated from."""

    version: _Count


class Close(_Frame, frozen=True):
    """The buffer is not kept: close its mapping."""


class Closed(_Frame, frozen=True):
    """The mapping is closed."""


class Failed(_Frame, frozen=True):
    """The push is over; `kind` says in what part, `text` is the error as its own side saw it."""

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    text: _Text


Frame = Hello | Ready | Plan | Bucket | Loaded | Released | Commit | Close | Closed | Failed

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """The frame's bytes.

    Example:
        >>> decode(encode(Loaded(3)))
        Loaded(index=3)
    """
    return _ENCODER.encode(frame)


def decode(data: bytes) -> Frame:
    """The frame that these bytes are.

    Raises:
        MalformedFrameError: too long, not msgpack, no such frame, or a field out of its range.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise MalformedFrameError(f"a frame of {len(data)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrameError(str(error)) from None
