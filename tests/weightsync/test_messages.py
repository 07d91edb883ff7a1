import contextlib
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.weightsync.messages import (
    MAX_FRAME_BYTES,
    Adapter,
    Bucket,
    Close,
    Closed,
    Commit,
    CudaHandle,
    Entry,
    Failed,
    Frame,
    GroupHandle,
    Hello,
    Loaded,
    MalformedFrameError,
    MemfdHandle,
    Plan,
    Ready,
    Released,
    decode,
    encode,
)

CUDA = CudaHandle("GPU-1", b"\x01" * 64, 512, 256, b"ref", 3, b"event", True)
FRAMES: list[Frame] = [
    Hello(1, "run", -1, 7),
    Ready(3, None),
    Ready(3, 2),
    Plan(3, "full", None, 4096, True, False),
    Plan(3, "delta", 2, 4096, True, True, MemfdHandle(8192)),
    Plan(3, "adapter", None, 4096, False, False, CUDA, Adapter("policy", 8, 16.0, ("q_proj",))),
    Plan(3, "full", None, 4096, True, False, GroupHandle("host", 1234, 0, 3, "gloo")),
    Bucket(0, (Entry("a", "bfloat16", (2, 3), 0, 0, 6),), 12, True, 2**64 - 1),
    Loaded(5),
    Released(3, None),
    Commit(3),
    Close(),
    Closed(),
    Failed("load", "ValueError: no such layer"),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_comes_back_equal(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_every_truncation_is_malformed(frame: Frame) -> None:
    data = encode(frame)
    for length in range(len(data)):
        with pytest.raises(MalformedFrameError):
            decode(data[:length])
    with pytest.raises(MalformedFrameError):
        decode(data + b"\x00")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_malformed_or_a_frame(data: bytes) -> None:
    with contextlib.suppress(MalformedFrameError):
        assert decode(encode(decode(data))) == decode(data)


def test_flipped_bits_never_escape_as_another_error() -> None:
    noise = random.Random(0)
    for frame in FRAMES:
        for _ in range(300):
            data = bytearray(encode(frame))
            data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
            with contextlib.suppress(MalformedFrameError):
                decode(bytes(data))


@pytest.mark.parametrize(
    "frame",
    [
        ["Loaded", -1],
        ["Loaded", "0"],
        ["Loaded"],
        ["Loaded", 1, 2],
        ["Nothing", 1],
        ["Plan", 1, "partial", None, 4096, True, False, None, None],
        ["Plan", 1, "full", None, 63, True, False, None, None],
        ["Hello", 1, "r" * 9000, 0, 0, ""],
        ["Bucket", 0, [["a", "float32", [1] * 65, 0, 0, 1]], 4, True, None],
        {"type": "Loaded", "index": 1},
        None,
    ],
)
def test_fields_out_of_their_range_are_malformed(frame: object) -> None:
    with pytest.raises(MalformedFrameError):
        decode(msgspec.msgpack.encode(frame))


def test_too_long_is_malformed() -> None:
    with pytest.raises(MalformedFrameError, match="at most"):
        decode(b"\x00" * (MAX_FRAME_BYTES + 1))
