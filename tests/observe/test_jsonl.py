import contextlib
import errno
import json
import logging
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbtide.errors import DataError, RunFolderError
from ebbtide.observe.jsonl import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_lines_are_in_the_file_as_soon_as_they_are_written(path: Path) -> None:
    with MetricsFile(path) as file:
        assert file.last_step == -1
        file.write(0, {"eval/accuracy": 0.25})
        file.write(1, {"reward/mean": 0.1, "time/generate_s": 2.0})
        assert path.read_text() == (
            '{"step": 0, "eval/accuracy": 0.25}\n{"step": 1, "reward/mean": 0.1, "time/generate_s": 2.0}\n'
        )
        assert file.last_step == 1


def test_values_that_json_has_not_become_null_and_are_read_as_nan(path: Path) -> None:
    with MetricsFile(path) as file:
        file.write(1, {"reward/mean": math.nan, "loss/total": math.inf, "optim/lr": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "reward/mean": None, "loss/total": None, "optim/lr": 0.5}
    (row,) = read_metrics(path)
    assert math.isnan(row["reward/mean"])
    assert math.isnan(row["loss/total"])
    assert row["optim/lr"] == 0.5


def test_every_bit_of_a_number_comes_back(path: Path) -> None:
    with MetricsFile(path) as file:
        file.write(1, {"reward/mean": 0.1 + 0.2})
    assert read_metrics(path)[0]["reward/mean"] == 0.1 + 0.2


def test_an_unknown_key_and_an_earlier_step_are_refused(path: Path) -> None:
    with MetricsFile(path) as file:
        file.write(3, {})
        with pytest.raises(DataError, match="no metric has this key"):
            file.write(4, {"rewrad/mean": 1.0})
        with pytest.raises(DataError, match="step=2: metrics of step 3 are already written"):
            file.write(2, {})
        file.write(3, {"eval/accuracy": 0.5})
    assert read_metrics(path) == [{"step": 3}, {"step": 3, "eval/accuracy": 0.5}]


def test_a_resumed_run_writes_no_step_twice(path: Path) -> None:
    with MetricsFile(path) as file:
        for step in range(6):
            file.write(step, {"reward/mean": float(step)})
    with MetricsFile(path, keep_through_step=3) as file:
        assert file.last_step == 3
        file.write(4, {"reward/mean": 40.0})
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(path)] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0),
    ]  # fmt: skip


def test_opened_again_it_goes_on_after_the_last_whole_line(path: Path) -> None:
    with MetricsFile(path) as file:
        file.write(1, {"reward/mean": 1.0})
    with path.open("a") as broken_off:
        broken_off.write('{"step": 2, "rewa')
    assert [row["step"] for row in read_metrics(path)] == [1]
    with MetricsFile(path) as file:
        assert file.last_step == 1
        file.write(2, {"reward/mean": 2.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"reward/mean": 1.0}', '{"step": "1"}', "", "\0\0"])
def test_a_file_that_holds_something_else_is_refused_and_left_alone(path: Path, line: str) -> None:
    text = f'{{"step": 1}}\n{line}\n{{"step": 2}}\n'
    path.write_text(text)
    with pytest.raises(DataError, match="line 2 is not an object with a step"):
        read_metrics(path)
    with pytest.raises(DataError, match="line 2 is not an object with a step"):
        MetricsFile(path)
    assert path.read_text() == text


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot be opened: Is a directory"):
        MetricsFile(tmp_path)


def test_closing_again_does_nothing(path: Path) -> None:
    file = MetricsFile(path)
    file.close()
    file.close()


Room = Callable[[int], None]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Call it with the bytes that still fit on the disk."""
    free = [1 << 60]
    write = os.write

    def scarce(descriptor: int, data: bytes) -> int:
        if free[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: free[0]])
        free[0] -= written
        return written

    monkeypatch.setattr("ebbtide.observe.jsonl.os.write", scarce)
    return lambda num_bytes: free.__setitem__(0, num_bytes)


def test_on_a_full_disk_training_goes_on_and_nothing_is_lost(
    path: Path, room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsFile(path) as file:
        file.write(1, {"reward/mean": 1.0})
        room(7)  # a part of the next line fits, and must not stay
        for step in (2, 3, 4):
            file.write(step, {"reward/mean": float(step)})
            assert path.read_text() == '{"step": 1, "reward/mean": 1.0}\n'
        assert file.num_waiting == 3
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "the disk is full, metrics wait in memory until there is room" in caplog.text
        room(1 << 60)
        file.write(5, {"reward/mean": 5.0})
        assert file.num_waiting == 0
        assert "has room again; no line was lost" in caplog.text
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_room_that_comes_before_the_end_is_used_by_closing(path: Path, room: Room) -> None:
    file = MetricsFile(path)
    room(0)
    file.write(1, {"reward/mean": 1.0})
    room(1 << 60)
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_a_disk_that_stays_full_ends_in_an_error_that_says_what_is_lost(path: Path, room: Room) -> None:
    file = MetricsFile(path)
    file.write(1, {})
    room(0)
    file.write(2, {})
    file.write(3, {})
    with pytest.raises(RunFolderError, match="the disk is full, and the last 2 lines could not be written"):
        file.close()
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_what_waits_in_memory_is_bounded(path: Path, room: Room) -> None:
    file = MetricsFile(path, max_waiting_bytes=100)
    room(0)
    for step in range(3):
        file.write(step, {"reward/mean": 0.0})
    with pytest.raises(RunFolderError, match=r"the disk is full, and \d+ B wait in memory"):
        file.write(3, {"reward/mean": 0.0})
    assert file.num_waiting == 4
    room(1 << 60)
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]


def test_dev_full_is_a_full_disk() -> None:
    file = MetricsFile(Path("/dev/full"))
    file.write(1, {"reward/mean": 1.0})
    assert file.num_waiting == 1
    with pytest.raises(RunFolderError, match="the last 1 lines"):
        file.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_real_disk_that_fills_up_and_is_cleared(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with MetricsFile(small_disk / "metrics.jsonl") as file:
        file.write(0, {"reward/mean": 0.0})
        with ballast.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(b"x" * 4096)
        for step in range(1, 300):
            file.write(step, {"reward/mean": float(step)})
        assert file.num_waiting > 100
        ballast.unlink()
    assert [row["step"] for row in read_metrics(small_disk / "metrics.jsonl")] == list(range(300))
