"""JSON Lines: layouts, columns, held-out files, and every way in which a file can be wrong."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ebbtide.config import validate
from ebbtide.data.sources.jsonl import JSONLSource
from ebbtide.errors import ConfigError, DataError

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 0},
}


def _write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return str(path)


def _source(path: str, **settings: Any) -> JSONLSource:
    config = validate(JSONLSource.Config, {"path": path, **settings})
    return JSONLSource(config, seed=0)


def test_plain_rows(tmp_path: Path) -> None:
    source = _source(_write(tmp_path / "a.jsonl", {"prompt": "1+1", "answer": 2, "level": "easy"}))
    assert len(source) == 1
    assert source[0] == {"prompt": "1+1", "answer": 2, "level": "easy"}


def test_verl_rows_keep_their_columns_and_get_an_answer(tmp_path: Path) -> None:
    assert _source(_write(tmp_path / "a.jsonl", VERL))[0] == {**VERL, "answer": "5"}


def test_columns_of_other_names(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", {"question": "q?", "label": "a", "solution": "because"})
    source = _source(path, prompt_column="question", answer_column="label", demonstration_column="solution")
    assert source[0] == {"question": "q?", "label": "a", "solution": "because", "prompt": "q?", "answer": "a"}
    assert source.demonstration(0) == "because"


def test_rows_without_answers_where_none_is_needed(tmp_path: Path) -> None:
    source = _source(_write(tmp_path / "a.jsonl", {"prompt": "Write a poem."}), answer_column="")
    assert source[0] == {"prompt": "Write a poem."}


def test_blank_lines_byte_order_mark_and_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n\n   \n{"prompt": "\xc3\xa9", "answer": "2"}')
    source = _source(str(path))
    assert [source[index]["prompt"] for index in range(len(source))] == ["a", "\u00e9"]


def test_a_pattern_reads_its_files_in_order(tmp_path: Path) -> None:
    _write(tmp_path / "part-2.jsonl", {"prompt": "c", "answer": "3"})
    _write(tmp_path / "part-1.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"})
    (tmp_path / "part-1b.jsonl").write_text("")
    source = _source(str(tmp_path / "part-*.jsonl"))
    assert [source[index]["prompt"] for index in range(len(source))] == ["a", "b", "c"]


def test_a_held_out_file_takes_its_prompts_out_of_training(tmp_path: Path) -> None:
    """The same question as text, as a message, and with other white space is the same question."""
    path = _write(
        tmp_path / "train.jsonl",
        {"prompt": "What is  2 + 3? ", "answer": "5"},
        VERL,
        {"prompt": "What is 2 + 4?", "answer": "6"},
    )
    held_out = _write(tmp_path / "eval.jsonl", {"prompt": "What is 2 + 3?", "answer": "5"}, VERL)
    source = _source(path, eval_path=held_out)
    assert [source[index]["prompt"] for index in range(len(source))] == ["What is 2 + 4?"]
    assert source.num_held_back == 2
    assert [row["prompt"] for row in source.held_out(1)] == ["What is 2 + 3?"]
    with pytest.raises(DataError, match="there are 1 different held-out prompts and 2 are wanted"):
        source.held_out(2)


def test_the_share_held_out_is_about_as_large_as_asked_for(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", *({"prompt": f"p{number}", "answer": "x"} for number in range(2000)))
    source = _source(path, eval_fraction=0.25)
    assert 440 < source.num_held_back < 560  # 500 with a standard deviation of 19
    assert len(source) + source.num_held_back == 2000


def test_which_prompts_are_held_out_does_not_depend_on_their_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "answer": "x"} for number in range(200)]
    first = _source(_write(tmp_path / "a.jsonl", *rows), eval_fraction=0.2)
    second = _source(_write(tmp_path / "b.jsonl", *rows[::-1]), eval_fraction=0.2)
    assert first.held_out(20) == second.held_out(20)


def _num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1"})
    before = _num_descriptors()
    source = _source(path)
    assert _num_descriptors() == before + 1
    del source
    assert _num_descriptors() == before


def test_a_fork_may_read_the_same_file(tmp_path: Path) -> None:
    """Rows are read by position: two processes that share a descriptor must not move each other."""
    source = _source(_write(tmp_path / "a.jsonl", *({"prompt": f"p{number}", "answer": "x"} for number in range(500))))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all(source[i]["prompt"] == f"p{i}" for _ in range(100) for i in range(500)) else 1)
    assert all(source[i]["prompt"] == f"p{i}" for _ in range(100) for i in reversed(range(500)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "settings", "text"),
    [
        ([GOOD, "", "{broken"], {}, r"a.jsonl line 3='\{broken': is not JSON: .*one JSON object a line"),
        ([GOOD, "[1, 2]"], {}, r"a.jsonl line 2='\[1, 2\]': is not an object"),
        ([GOOD, {"promt": "b", "answer": "2"}], {}, r"data.prompt_column='prompt': .*line 2 has no such column; its "
         r"columns: promt, answer. Did you mean 'promt'\?"),
        ([GOOD, {"prompt": "b"}], {}, r"data.answer_column='answer': .*line 2 has no such column.*answer_column=''"),
        ([GOOD, {"prompt": "b", "answer": None}], {}, r"line 2 has nothing in that column"),
        ([{**VERL, "reward_model": {"style": "rule"}}], {}, r"data.answer_column='answer': .*line 1 has no such"),
        ([GOOD, {"prompt": "", "answer": "2"}], {}, r"prompt of .*line 2='': a prompt must not be empty"),
        ([{"prompt": 3, "answer": "2"}], {}, r"prompt of .*line 1=3: a prompt is text, or a list of chat messages"),
        ([{"prompt": [], "answer": "2"}], {}, r"prompt of .*line 1=\[\]: a prompt is text"),
        ([{"prompt": [{"role": "user"}], "answer": "2"}], {}, r"each have a role and a content"),
        ([{"prompt": ["hi"], "answer": "2"}], {}, r"each have a role and a content"),
        ([], {}, r"data.path='.*a.jsonl': has no rows"),
        ([GOOD], {"eval_fraction": 0.999999}, r"all 1 rows are held out, and none is left"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_with_line_and_remedy(
    tmp_path: Path, rows: list[Any], settings: dict[str, Any], text: str
) -> None:
    path = _write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError, match=text):
        _source(path, **settings)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n\x1f\x8b\x08\x00\xff\xfe\n')
    with pytest.raises(DataError, match=r"a.jsonl line 2=.*is not JSON"):
        _source(str(path))


def test_missing_files_folders_and_empty_patterns(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", GOOD)
    with pytest.raises(DataError, match=r"data.path='.*trian.jsonl': no such file. Did you mean '.*train.jsonl'\?"):
        _source(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        _source(str(tmp_path))
    with pytest.raises(DataError, match="matches no file"):
        _source(str(tmp_path / "*.parquet"))
    with pytest.raises(DataError, match=r"data.eval_path='nowhere/b.jsonl': no such file"):
        _source(str(tmp_path / "train.jsonl"), eval_path="nowhere/b.jsonl")


def test_no_way_to_hold_out_is_named_when_rows_are_wanted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.eval_fraction=None: there are 0 .* 4 are wanted.*data.eval_path"):
        _source(_write(tmp_path / "a.jsonl", GOOD)).held_out(4)


def test_two_ways_to_hold_out_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="contradicts eval_path"):
        validate(JSONLSource.Config, {"path": "a", "eval_path": "b", "eval_fraction": 0.1})


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (None, r"data.demonstration_column=None: a supervised start needs demonstrations"),
        ("shown", r"has no such column.*Did you mean 'show'\?"),
        ("empty", r"empty of .* line 1='': a demonstration is text"),
        ("number", r"a demonstration is text"),
    ],
)
def test_demonstrations_that_are_not_there(tmp_path: Path, column: str | None, text: str) -> None:
    path = _write(tmp_path / "a.jsonl", {**GOOD, "show": "1", "empty": "", "number": 3})
    settings = {} if column is None else {"demonstration_column": column}
    with pytest.raises(DataError, match=text):
        _source(path, **settings).demonstration(0)
