"""Rows from Parquet, copied once into memory-mapped Arrow, where any row can be reached by itself.

Parquet is compressed in groups of many thousand rows, and drawing rows at random would unpack a group for each. The
copy is a temporary file that has no name any more once it is mapped: nothing is left behind, however the run ends.
"""

import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide.data.sources.table import TableConfig, TableSource
from ebbtide.errors import DataError, problem

__all__ = ["ParquetSource"]

_BATCH_ROWS = 1024


class ParquetSource(TableSource):
    """Rows of one or more Parquet files, plain or in verl's layout.

    Source: verl's RLHFDataset layout (verl-project/verl, docs/preparation/prepare_data.rst); here the answer is also
    put where every reward looks for it.
    """

    class Config(TableConfig):
        """Which files and columns."""

        type: str = "parquet"

    def __init__(self, config: Config, *, seed: int) -> None:  # noqa: ARG002 neither rows nor split depend on it
        super().__init__(config, _Mapped)


class _Mapped:
    """The rows of some files as one Arrow table that lives on disk."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        files = [_opened(path) for path in paths]
        self._firsts = [0, *accumulate(file.metadata.num_rows for file in files)]
        self._batches: list[Any] = _mapped(paths, files)
        self._batch_firsts = [0, *accumulate(len(batch) for batch in self._batches)]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        at = bisect_right(self._batch_firsts, index) - 1
        row: dict[str, Any] = self._batches[at].slice(index - self._batch_firsts[at], 1).to_pylist()[0]
        return row

    def scan(self, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """All rows in order; of the others only the names of their columns are of use, and those are in errors."""
        for batch in self._batches:
            present = [name for name in columns if name in batch.schema.names]
            yield from batch.select(present).to_pylist() if present else ({} for _ in range(len(batch)))

    def where(self, index: int) -> str:
        """File and row, counted from 0."""
        file = bisect_right(self._firsts, index) - 1
        return f"{self._paths[file]} row {index - self._firsts[file]}"


def _opened(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(problem("data.path", str(path), f"cannot be read as Parquet: {error}")) from error


def _mapped(paths: Sequence[Path], files: Sequence[Any]) -> list[Any]:
    schema = files[0].schema_arrow
    with tempfile.NamedTemporaryFile(prefix="ebbtide-", suffix=".arrow") as copy:
        with pa.ipc.new_file(copy.name, schema) as writer:
            for path, file in zip(paths, files, strict=True):
                for batch in _batches(path, file, schema):
                    writer.write_batch(batch)
        reader = pa.ipc.open_file(pa.memory_map(copy.name))
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _batches(path: Path, file: Any, schema: Any) -> Iterator[Any]:
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield batch if batch.schema.equals(schema) else batch.cast(schema)
    except (pa.ArrowException, ValueError, OSError) as error:
        rule = f"is damaged, or has other columns than the first file: {error}"
        raise DataError(problem("data.path", str(path), rule, "Files read together need one schema")) from error
