"""Rows from JSON Lines: one object a line, found again by its place in the file."""

import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from ebbtide.data.sources.table import TableConfig, TableSource
from ebbtide.errors import DataError, problem

__all__ = ["JSONLSource"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JSONLSource(TableSource):
    """Rows of one or more JSON Lines files, plain or in verl's layout.

    Source: JSON Lines (jsonlines.org); blank lines are passed over.
    """

    class Config(TableConfig):
        """Which files and columns."""

        type: str = "jsonl"

    def __init__(self, config: Config, *, seed: int) -> None:  # noqa: ARG002 neither rows nor split depend on it
        super().__init__(config, _Lines)


class _Lines:
    """The lines of some files: 16 bytes each in memory, read by position, so that forks may share the descriptors."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._descriptors = [os.open(path, os.O_RDONLY) for path in paths]
        weakref.finalize(self, _close, self._descriptors)
        self._places = [_places(path) for path in paths]
        self._firsts = [0, *accumulate(len(starts) for starts, _ in self._places)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        file, start, length = self._locate(index)
        text = os.pread(self._descriptors[file], length, start)
        try:
            row = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._refused(index, text, f"is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise self._refused(index, text, "is not an object")
        return row

    def scan(self, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:  # noqa: ARG002 a line is parsed as a whole
        """All rows in order."""
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """File and line, counted as editors do."""
        file, start, _ = self._locate(index)
        with self._paths[file].open("rb") as stream:
            number = 1 + sum(1 for _ in _lines_before(stream, start))
        return f"{self._paths[file]} line {number}"

    def _locate(self, index: int) -> tuple[int, int, int]:
        file = bisect_right(self._firsts, index) - 1
        starts, lengths = self._places[file]
        at = index - self._firsts[file]
        return file, starts[at], lengths[at]

    def _refused(self, index: int, text: bytes, rule: str) -> DataError:
        shown = text[:80].decode("utf-8", "replace").rstrip()
        return DataError(problem(self.where(index), shown, rule, "The format is one JSON object a line"))


def _places(path: Path) -> "tuple[array[int], array[int]]":
    """Where each line that is not blank starts, and how long it is, in bytes."""
    starts, lengths = array("q"), array("q")
    position = 0
    with path.open("rb") as stream:
        for line in stream:
            skipped = len(_BYTE_ORDER_MARK) if position == 0 and line.startswith(_BYTE_ORDER_MARK) else 0
            if line[skipped:].strip():
                starts.append(position + skipped)
                lengths.append(len(line) - skipped)
            position += len(line)
    return starts, lengths


def _lines_before(stream: Any, position: int) -> Iterator[bytes]:
    done = 0
    for line in stream:
        done += len(line)
        if done > position:
            return
        yield line


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
