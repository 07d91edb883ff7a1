"""What every data source promises, over all that the folder has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbtide import plugins
from ebbtide.config import validate
from ebbtide.data.sources.base import content_key
from ebbtide.errors import DataError

ROWS = [
    {"prompt": f"What is {number % 150} + 1?", "answer": str(number % 150 + 1), "show": "x"} for number in range(200)
]


def _jsonl(folder: Path) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {"path": str(path), "eval_fraction": 0.3, "demonstration_column": "show"}


def _parquet(folder: Path) -> dict[str, Any]:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return {"path": str(path), "eval_fraction": 0.3, "demonstration_column": "show"}


def _reasoning_gym(_folder: Path) -> dict[str, Any]:
    return {
        "task": "chain_sum",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "size": 120,
    }


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "reasoning_gym": _reasoning_gym,
}
"""Settings of a small source of each kind, whose prompts repeat."""


@pytest.fixture(params=plugins.names("data.sources"))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Any]:
    assert request.param in MAKERS, f"add settings for data source {request.param!r} to this contract"
    cls = plugins.load("data.sources", request.param)
    config = validate(cls.Config, {"type": request.param, **MAKERS[request.param](tmp_path)})
    return lambda seed: cls(config, seed=seed)


def test_rows_have_a_prompt_and_are_the_same_at_every_call_and_start(make: Callable[[int], Any]) -> None:
    source, again = make(3), make(3)
    assert len(source) == len(again) > 0
    rows = [source[index] for index in range(len(source))]
    assert all(row["prompt"] and row["answer"] for row in rows)
    assert [again[index] for index in reversed(range(len(source)))] == rows[::-1]
    assert [source[index] for index in range(len(source))] == rows


def test_no_held_out_prompt_is_ever_trained_on(make: Callable[[int], Any]) -> None:
    """The generated task has 200 prompts and the files have 150, so that without the rule they would meet."""
    for seed in range(3):
        source = make(seed)
        before = {content_key(source[index]["prompt"]) for index in range(len(source))}
        held_out = {content_key(row["prompt"]) for row in source.held_out(20)}
        after = {content_key(source[index]["prompt"]) for index in range(len(source))}
        assert before == after
        assert not held_out & before


def test_held_out_prompts_differ_and_do_not_depend_on_the_seed(make: Callable[[int], Any]) -> None:
    rows = make(0).held_out(20)
    assert len({content_key(row["prompt"]) for row in rows}) == 20
    source = make(1)
    assert source.held_out(7) == rows[:7]
    assert source.held_out(20) == rows


def test_more_held_out_rows_than_there_are_is_an_error(make: Callable[[int], Any]) -> None:
    with pytest.raises(DataError, match="and 200 are wanted"):
        make(0).held_out(200)


def test_an_index_out_of_range_is_an_index_error(make: Callable[[int], Any]) -> None:
    source = make(0)
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source[index]


def test_demonstrations_are_text_and_stay_the_same(make: Callable[[int], Any]) -> None:
    source, again = make(4), make(4)
    shown = [source.demonstration(index) for index in range(10)]
    assert all(isinstance(text, str) and text for text in shown)
    assert [again.demonstration(index) for index in range(10)] == shown


def test_the_seed_decides_nothing_or_the_rows(make: Callable[[int], Any]) -> None:
    """Files have the rows that they have; a generator makes others for another seed, not the same ones shifted."""
    first, second = ([make(seed)[index]["prompt"] for index in range(30)] for seed in (0, 1))
    assert first == second or sum(a == b for a, b in zip(first[1:], second, strict=False)) < 10
