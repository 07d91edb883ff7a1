from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync.base import NamedTensor
from ebbtide.weightsync.buckets import ALIGNMENT, DTYPES, Assembler, Filler, LoadsSlices, dtype_name, flat_bytes
from ebbtide.weightsync.load import CopyInto
from ebbtide.weightsync.messages import MAX_FRAME_BYTES, Bucket, Entry, encode


def through_buckets(weights: Sequence[NamedTensor], bucket_bytes: int, load: object) -> list[Bucket]:
    """Fill, check and load every bucket, over one piece of memory."""
    filler, memory = Filler(weights, bucket_bytes), torch.zeros(bucket_bytes, dtype=torch.uint8)
    assembler = Assembler(load, bucket_bytes)  # type: ignore[arg-type]
    buckets: list[Bucket] = []

    def write(offset: int, source: torch.Tensor) -> None:
        assert offset % ALIGNMENT == 0
        memory[offset : offset + source.nbytes] = flat_bytes(source)

    while not buckets or not buckets[-1].is_last:
        entries, num_bytes, is_last = filler.fill(write)
        bucket = Bucket(len(buckets), entries, num_bytes, is_last)
        assert num_bytes <= bucket_bytes
        assert len(encode(bucket)) <= MAX_FRAME_BYTES
        assembler.check(bucket)
        assembler.take(entries, lambda e: view(memory, e))
        memory.fill_(255)
        buckets.append(bucket)
    return buckets


def view(memory: torch.Tensor, entry: Entry) -> torch.Tensor:
    dtype = DTYPES[entry.dtype]
    return memory[entry.offset_bytes : entry.offset_bytes + entry.count * dtype.itemsize].view(dtype)


def test_layout_by_hand() -> None:
    """Halves of 256 bytes: 100 are aligned to 128; 120 fit after them; 80 open the next; 600 are cut in three."""
    weights = [
        ("a", torch.zeros(25)),
        ("b", torch.zeros(30)),
        ("c", torch.zeros(20)),
        ("d", torch.zeros(150)),
        ("e", torch.zeros(64)),
    ]
    buckets = through_buckets(weights, 256, lambda _: None)
    laid = [[(e.name, e.offset_bytes, e.start, e.count) for e in bucket.entries] for bucket in buckets]
    assert laid == [
        [("a", 0, 0, 25), ("b", 128, 0, 30)],
        [("c", 0, 0, 20), ("d", 128, 0, 32)],
        [("d", 0, 32, 64)],
        [("d", 0, 96, 54)],
        [("e", 0, 0, 64)],
    ]
    assert [bucket.is_last for bucket in buckets] == [False] * 4 + [True]


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8),
    bucket=st.sampled_from([64, 128, 192, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.complex128]),
    takes_slices=st.booleans(),
)
def test_every_weight_comes_out_once_and_equal(
    shapes: list[list[int]], bucket: int, dtype: torch.dtype, takes_slices: bool
) -> None:
    weights = [(str(i), torch.rand(shape).mul(50).to(dtype)) for i, shape in enumerate(shapes)]
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights}
    seen: list[str] = []

    def load(some: Sequence[NamedTensor]) -> None:
        for name, tensor in some:
            seen.append(name)
            targets[name].copy_(tensor)

    through_buckets(weights, bucket, CopyInto(targets) if takes_slices else load)
    for name, tensor in weights:
        assert targets[name].dtype == tensor.dtype
        assert bytes(flat_bytes(targets[name]).tolist()) == bytes(flat_bytes(tensor).tolist())
    assert takes_slices or seen == [name for name, _ in weights]


def test_thousands_of_small_weights_stay_within_a_frame() -> None:
    weights = [(f"model.layers.{i}.some.long.name.of.a.weight", torch.zeros(1)) for i in range(3000)]
    buckets = through_buckets(weights, 1 << 20, lambda _: None)
    assert len(buckets) > 1
    assert sum(len(bucket.entries) for bucket in buckets) == 3000


def entry(name: str = "a", dtype: str = "float32", offset: int = 0, start: int = 0, count: int = 16) -> Entry:
    return Entry(name, dtype, (40,), offset, start, count)


@pytest.mark.parametrize(
    ("bucket", "text"),
    [
        (Bucket(0, (), 512, True), "has 512 bytes, the plan allows 256"),
        (Bucket(0, (entry(dtype="float5"),), 64, True), "unknown dtype 'float5'"),
        (Bucket(0, (entry(offset=2),), 128, True), "does not lie inside it"),
        (Bucket(0, (entry(),), 60, True), "does not lie inside it"),
        (Bucket(0, (entry(start=16),), 64, False), "starts at element 16, out of turn"),
        (Bucket(0, (entry(count=41),), 164, False), "starts at element 0, out of turn"),
        (Bucket(0, (entry(), entry("b", offset=64)), 128, False), "'b' starts at element 0, out of turn"),
        (Bucket(0, (entry(), entry(offset=64, start=8)), 128, False), "starts at element 8, out of turn"),
        (Bucket(0, (entry(),), 64, True), "is the last, and 'a' is not complete"),
    ],
)
def test_what_does_not_fit_is_refused(bucket: Bucket, text: str) -> None:
    with pytest.raises(WeightSyncError, match="bucket=0") as caught:
        Assembler(lambda _: None, 256).check(bucket)
    assert text in str(caught.value)


def test_dtypes_have_their_torch_names() -> None:
    assert DTYPES[dtype_name(torch.float8_e4m3fn)] is torch.float8_e4m3fn
    assert not any(name.startswith("q") for name in DTYPES)


def test_who_takes_slices() -> None:
    assert isinstance(CopyInto({}), LoadsSlices)
    assert not isinstance(lambda weights: None, LoadsSlices)
