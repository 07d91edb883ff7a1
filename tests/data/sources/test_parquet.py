"""Parquet: layouts, several files, types, and that the mapped copy leaves nothing behind."""

import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbtide.config import validate
from ebbtide.data.sources.base import check_prompt
from ebbtide.data.sources.parquet import ParquetSource
from ebbtide.errors import DataError


def _write(path: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def _source(path: str, **settings: Any) -> ParquetSource:
    return ParquetSource(validate(ParquetSource.Config, {"path": path, **settings}), seed=0)


def test_verl_rows_keep_their_columns_and_get_an_answer(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "me"}],
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"split": "train", "index": 7, "tags": ["a", "b"]},
        }
    ]
    row = _source(_write(tmp_path / "a.parquet", rows))[0]
    # Parquet gives both messages a name, and nothing stands in the first; a template would print that as None.
    assert row["prompt"] == rows[0]["prompt"]
    assert row["answer"] == "5"
    assert row["extra_info"] == {"split": "train", "index": 7, "tags": ["a", "b"]}
    check_prompt(row["prompt"], lambda: "")


def test_rows_of_several_files_and_row_groups_are_found_by_number(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "answer": number} for number in range(3000)]
    _write(tmp_path / "b.parquet", rows[1300:], row_group_size=999)
    _write(tmp_path / "a.parquet", rows[:1300], row_group_size=7)
    source = _source(str(tmp_path / "*.parquet"))
    assert len(source) == 3000
    for index in (0, 6, 7, 1023, 1024, 1299, 1300, 2299, 2999):
        assert source[index] == rows[index]


def test_the_mapped_copy_has_no_name_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = _write(tmp_path / "a.parquet", [{"prompt": "p", "answer": "x"}])
    source = _source(path)
    assert [item.name for item in tmp_path.iterdir()] == ["a.parquet"]
    assert source[0]["prompt"] == "p"


def test_rows_stay_on_disk(tmp_path: Path) -> None:
    """Of 20 MB of text less than a tenth stays in Arrow's pool, and next to nothing in Python objects."""
    rows = [{"prompt": f"{number} " + "x" * 10_000, "answer": "y"} for number in range(2000)]
    path = _write(tmp_path / "a.parquet", rows, compression="none", use_dictionary=False)
    del rows
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        source = _source(path)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < 2_000_000
    assert kept_bytes < 500_000
    assert len(source[1999]["prompt"]) == 10_005


def test_errors_name_file_and_row_and_all_columns(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", [{"prompt": "p", "answer": "x", "more": 1}])
    _write(
        tmp_path / "b.parquet", [{"prompt": "p", "answer": "x", "more": 1}, {"prompt": "", "answer": "x", "more": 1}]
    )
    with pytest.raises(DataError, match=r"prompt of .*b.parquet row 1='': a prompt must not be empty"):
        _source(str(tmp_path / "*.parquet"))
    with pytest.raises(DataError, match=r"a.parquet row 0 has no such column; its columns: prompt, answer, more"):
        _source(str(tmp_path / "a.parquet"), prompt_column="question")
    _write(tmp_path / "c.parquet", [{"prompt": "p", "answer": None}])
    with pytest.raises(DataError, match=r"c.parquet row 0 has nothing in that column"):
        _source(str(tmp_path / "c.parquet"))


def test_what_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("prompt,answer\n")
    with pytest.raises(DataError, match=r"data.path='.*a.parquet': cannot be read as Parquet"):
        _source(str(tmp_path / "a.parquet"))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    _write(path, [{"prompt": f"p{number}" * 50, "answer": "x"} for number in range(500)], compression="zstd")
    data = bytearray(path.read_bytes())
    data[100:400] = bytes(300)
    path.write_bytes(data)
    with pytest.raises(DataError, match="is damaged"):
        _source(str(path))


def test_files_of_different_columns_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", [{"prompt": "p", "answer": "x"}])
    _write(tmp_path / "b.parquet", [{"prompt": "p", "label": "x"}])
    with pytest.raises(DataError, match=r"b.parquet': is damaged, or has other columns than the first file"):
        _source(str(tmp_path / "*.parquet"))


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no rows"):
        _source(str(tmp_path / "a.parquet"))
