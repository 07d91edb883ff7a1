import fcntl
import os

import pytest
import torch

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync.memfd import MemfdBuffer, MemfdMapping
from ebbtide.weightsync.messages import Entry, MemfdHandle

BUCKET = 4096


def test_both_ends_see_one_memory_in_two_halves() -> None:
    buffer = MemfdBuffer(BUCKET)
    mapping = MemfdMapping(buffer.export(), BUCKET, buffer.descriptors)
    buffer.write(0, 64, torch.arange(4.0))
    buffer.write(1, 0, torch.full((2,), 7, dtype=torch.int64))
    first = mapping.view(0, Entry("a", "float32", (4,), 64, 0, 4), torch.float32)
    second = mapping.view(1, Entry("b", "int64", (2,), 0, 0, 2), torch.int64)
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [7, 7]
    assert bytes(mapping.payload(1, 8)) == bytes(buffer.payload(1, 8)) == b"\x07" + b"\x00" * 7
    assert mapping.kept() == ["a", "b"]
    del first
    assert mapping.kept() == ["b"]
    assert not mapping.close()
    del second
    assert mapping.close()
    buffer.free()
    buffer.free()


def test_poison_reads_as_nan_in_every_floating_dtype_that_has_one() -> None:
    buffer = MemfdBuffer(BUCKET)
    mapping = MemfdMapping(buffer.export(), BUCKET, buffer.descriptors)
    buffer.poison(1)
    for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, name)
        view = mapping.view(1, Entry("a", name, (4,), 0, 0, 4), dtype)
        assert bool(view.to(torch.float32).isnan().all()), name
        assert mapping.view(0, Entry("a", name, (4,), 0, 0, 4), dtype).to(torch.float32).tolist() == [0] * 4
    del view
    assert mapping.close()
    buffer.free()


def test_memory_that_is_not_as_announced_is_refused() -> None:
    buffer = MemfdBuffer(BUCKET)
    with pytest.raises(WeightSyncError, match="another size"):
        MemfdMapping(MemfdHandle(BUCKET), BUCKET, buffer.descriptors)
    with pytest.raises(WeightSyncError, match="exactly one"):
        MemfdMapping(buffer.export(), BUCKET, ())
    unsealed = os.memfd_create("some", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 2 * BUCKET)
    with pytest.raises(WeightSyncError, match="no seal"):
        MemfdMapping(buffer.export(), BUCKET, (unsealed,))
    os.close(unsealed)
    buffer.free()


def test_the_memory_cannot_be_cut_under_a_reader() -> None:
    buffer = MemfdBuffer(BUCKET)
    [fd] = buffer.descriptors
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    buffer.free()
