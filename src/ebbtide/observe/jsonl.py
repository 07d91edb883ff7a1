"""`metrics.jsonl`: one JSON object a line, appended as each step ends, so that a killed run keeps what it had.

Lines are in the order of steps; a step may have several, as its evaluation may come later than its update.

A line is handed to the kernel whole or not at all: where the disk is full, the part that fitted is cut off again, the
line waits in memory, and training goes on. Lines that wait are written before later ones, so that order holds.
"""

import errno
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from ebbtide.errors import DataError, RunFolderError, problem
from ebbtide.observe.metrics import check
from ebbtide.units import MIB, format_bytes

__all__ = ["MetricsFile", "read_metrics"]

_log = logging.getLogger(__name__)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class MetricsFile:
    """Appends the metrics of each step.

    Args:
        path: the file; made where it is not there.
        keep_through_step: lines of later steps, and a line broken off by a kill, are cut off first, so that a resumed
            run writes no step twice; None keeps all whole lines.
        max_waiting_bytes: how much may wait in memory while the disk is full.

    Raises:
        RunFolderError: the file cannot be opened.
        DataError: it holds something else than metrics.
    """

    def __init__(self, path: Path, *, keep_through_step: int | None = None, max_waiting_bytes: int = 64 * MIB) -> None:
        self.path = path
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_full = False
        try:
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(problem("metrics", str(path), f"cannot be opened: {error.strerror}")) from error
        self._last_step, self._whole_bytes = -1, 0
        for step, end in _line_ends(path):
            if keep_through_step is not None and step > keep_through_step:
                break
            self._last_step, self._whole_bytes = step, end
        if path.is_file():  # a device such as /dev/null has no length
            os.ftruncate(self._descriptor, self._whole_bytes)

    @property
    def last_step(self) -> int:
        """The step of the last line; -1 before the first."""
        return self._last_step

    @property
    def num_waiting(self) -> int:
        """Lines that the disk had no room for yet."""
        return len(self._waiting)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; a value that is not finite becomes null, which JSON has instead.

        Raises:
            DataError: a key that is not in the table of metrics, or a step that lies before the last one.
            RunFolderError: the disk has been full for so long that no more may wait in memory; or another failure.
        """
        assert self._descriptor is not None, f"{self.path} was closed"
        check(metrics)
        if step < self._last_step:
            raise DataError(problem("step", step, f"metrics of step {self._last_step} are already written"))
        values = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"
        self._last_step = step
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        self._flush()
        if self._waiting_bytes > self._max_waiting_bytes:
            raise RunFolderError(self._full(f"and {format_bytes(self._waiting_bytes)} wait in memory"))

    def close(self) -> None:
        """Write what still waits, and close; calling it again does nothing.

        Raises:
            RunFolderError: the disk is still full; says how many of the last lines are lost.
        """
        if self._descriptor is None:
            return
        try:
            self._flush()
        finally:
            os.close(self._descriptor)
            self._descriptor = None
        if self._waiting:
            raise RunFolderError(self._full(f"and the last {len(self._waiting)} lines could not be written"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        while self._waiting:
            if not self._append(self._waiting[0]):
                if not self._is_full:
                    _log.warning(self._full("metrics wait in memory until there is room, and training goes on"))
                self._is_full = True
                return
            self._waiting_bytes -= len(self._waiting.popleft())
        if self._is_full:
            _log.warning("%s has room again; no line was lost", self.path)
        self._is_full = False

    def _append(self, line: bytes) -> bool:
        """Whether the whole line is written; if not, none of it is."""
        assert self._descriptor is not None
        written = 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            if written:
                os.ftruncate(self._descriptor, self._whole_bytes)
            if error.errno in _FULL:
                return False
            raise RunFolderError(problem("metrics", str(self.path), f"cannot be written: {error.strerror}")) from error
        self._whole_bytes += len(line)
        return True

    def _full(self, consequence: str) -> str:
        return problem("metrics", str(self.path), f"the disk is full, {consequence}", "Make room on it")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All whole lines, in order; null becomes NaN. A last line that was broken off by a kill is left out.

    Returns:
        One mapping a line; `step` is among the keys.

    Raises:
        DataError: a line in the middle is not an object with a step.
    """
    return [{key: math.nan if value is None else value for key, value in row.items()} for row, _ in _rows(path)]


def _line_ends(path: Path) -> Iterator[tuple[int, int]]:
    """Step of each whole line, and the byte after it."""
    return ((int(row["step"] or 0), end) for row, end in _rows(path))


def _rows(path: Path) -> Iterator[tuple[dict[str, float | None], int]]:
    if not path.is_file():
        return
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                    raise ValueError("no step")
            except ValueError as error:
                rule = f"line {number} is not an object with a step"
                raise DataError(problem("metrics", str(path), rule)) from error
            yield row, end
