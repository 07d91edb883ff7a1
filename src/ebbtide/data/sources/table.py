"""What sources that read files share: which columns mean what, and which rows are held out.

Two layouts are known without being told. Plain rows have `prompt` and `answer`. verl's rows have `prompt` as chat
messages and the answer in `reward_model.ground_truth`, which becomes `answer`; all their own columns stay.

Every row is looked at once at the start, so that a bad one stops the run before it has cost anything. What is kept in
memory is 16 bytes a row; rows are read again from their file when they are drawn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ebbtide.data.sources.base import Row, SourceConfig, check_prompt, content_key, is_held_out
from ebbtide.errors import ConfigError, DataError, did_you_mean, problem

__all__ = ["Records", "TableConfig", "TableSource"]


class TableConfig(SourceConfig):
    """Which files, and which of their columns."""

    path: str
    """File to train on, or a pattern such as data/train-*.parquet."""
    eval_path: str | None = None
    """File or pattern of held-out rows; training rows with the same prompts are left out."""
    eval_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of the prompts in `path` to hold out, chosen by content, where there is no `eval_path`."""
    prompt_column: str = "prompt"
    """Column of the prompt, which is text or a list of chat messages."""
    answer_column: str = "answer"
    """Column of the answer that rewards compare with; verl's reward_model.ground_truth is taken where it is missing.
    Empty where the rows have no answer."""
    demonstration_column: str | None = None
    """Column of a completion for a supervised start."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> "TableConfig":
        if self.eval_path is not None and self.eval_fraction is not None:
            rule = "contradicts eval_path, which is set as well"
            raise ConfigError(problem("eval_fraction", self.eval_fraction, rule, "Remove one of them"))
        return self


class Records(Protocol):
    """The raw rows of some files."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """One row."""
        ...

    def scan(self, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """All rows in order; columns not named may be missing."""
        ...

    def where(self, index: int) -> str:
        """File and place of a row, for errors."""
        ...


class TableSource:
    """Rows of files; a format gives the function that opens its files.

    Raises:
        DataError: a file is missing or unreadable, a row breaks a rule, or nothing is left to train on.
    """

    def __init__(self, config: TableConfig, read: Callable[[Sequence[Path]], Records]) -> None:
        self._config = config
        self._records = read(_files("data.path", config.path))
        keys = self._keys(self._records)
        is_training = np.ones(len(keys), dtype=bool)
        self._eval_records = self._records
        self._eval_rows = np.empty(0, dtype=np.int64)
        if config.eval_path is not None:
            self._eval_records = read(_files("data.eval_path", config.eval_path))
            eval_keys = self._keys(self._eval_records)
            self._eval_rows = _by_key(eval_keys)
            is_training = ~np.isin(keys, eval_keys)
        elif config.eval_fraction is not None:
            is_training = np.array([not is_held_out(int(key), config.eval_fraction) for key in keys], dtype=bool)
            chosen = np.flatnonzero(~is_training)
            self._eval_rows = chosen[_by_key(keys[chosen])]
        self._rows = np.flatnonzero(is_training)
        if not len(self._rows):
            rule = f"all {len(keys)} rows are held out, and none is left to train on" if len(keys) else "has no rows"
            raise DataError(problem("data.path", config.path, rule))

    @property
    def num_held_back(self) -> int:
        """Rows of `path` that are not trained on because their prompts are held out."""
        return len(self._records) - len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"row {index} of {len(self._rows)}")
        return self._row(self._records, int(self._rows[index]))

    def held_out(self, num_rows: int) -> list[Row]:
        """See the contract; in the order of their content keys, so that a part of them is a fair sample."""
        if len(self._eval_rows) < num_rows:
            where = "data.eval_path" if self._config.eval_path is not None else "data.eval_fraction"
            value = self._config.eval_path if self._config.eval_path is not None else self._config.eval_fraction
            rule = f"there are {len(self._eval_rows)} different held-out prompts and {num_rows} are wanted"
            remedy = "Lower eval.prompts, name a data.eval_path with more rows, or set a larger data.eval_fraction"
            raise DataError(problem(where, value, rule, remedy))
        return [self._row(self._eval_records, int(row)) for row in self._eval_rows[:num_rows]]

    def demonstration(self, index: int) -> str:
        """The demonstration column of row `index`."""
        column = self._config.demonstration_column
        if column is None:
            rule = "a supervised start needs demonstrations"
            raise DataError(problem("data.demonstration_column", None, rule, "Name their column, or remove [warmup]"))
        row = self[index]
        where = self._records.where(int(self._rows[index]))
        if column not in row:
            raise DataError(_no_column("data.demonstration_column", column, where, row))
        if not isinstance(row[column], str) or not row[column]:
            raise DataError(problem(f"{column} of {where}", row[column], "a demonstration is text that is not empty"))
        text: str = row[column]
        return text

    def _keys(self, records: Records) -> NDArray[np.uint64]:
        keys = np.empty(len(records), dtype=np.uint64)
        columns = [self._config.prompt_column, self._config.answer_column, "reward_model"]
        for index, raw in enumerate(records.scan(columns)):
            keys[index] = content_key(self._normalised(raw, records, index)["prompt"])
        return keys

    def _row(self, records: Records, index: int) -> Row:
        return self._normalised(records[index], records, index)

    def _normalised(self, raw: Mapping[str, Any], records: Records, index: int) -> dict[str, Any]:
        name = self._config.prompt_column
        if name not in raw:
            raise DataError(_no_column("data.prompt_column", name, records.where(index), records[index]))
        prompt = raw[name]
        if isinstance(prompt, list):  # Parquet fills a message's missing keys with nulls, which templates would print
            prompt = [_without_nulls(message) for message in prompt]
        check_prompt(prompt, lambda: f"{name} of {records.where(index)}")
        row = {**raw, "prompt": prompt}
        if self._config.answer_column:
            row["answer"] = self._answer(raw, records, index)
        return row

    def _answer(self, raw: Mapping[str, Any], records: Records, index: int) -> Any:
        name = self._config.answer_column
        judged = raw.get("reward_model")
        answer = raw.get(name)
        if answer is None and isinstance(judged, Mapping):
            answer = judged.get("ground_truth")
        if answer is None:
            text = _no_column("data.answer_column", name, records.where(index), records[index])
            raise DataError(f"{text} Set data.answer_column='' where no reward needs an answer.")
        return answer


def _files(where: str, path: str) -> list[Path]:
    """The file, or those that the pattern matches, sorted."""
    if has_magic(path):
        found = [Path(item) for item in sorted(glob(path, recursive=True)) if Path(item).is_file()]  # noqa: PTH207 may be absolute
        if not found:
            raise DataError(problem(where, path, "matches no file", "Paths are relative to the working directory"))
        return found
    file = Path(path)
    if file.is_dir():
        raise DataError(problem(where, path, "is a folder", f"Name a file, or a pattern such as {file / '*'}"))
    if not file.is_file():
        names = [item.name for item in file.parent.iterdir()] if file.parent.is_dir() else []
        near = get_close_matches(file.name, names, n=1)
        remedy = (
            f"Did you mean {str(file.parent / near[0])!r}?" if near else "Paths are relative to the working directory"
        )
        raise DataError(problem(where, path, "no such file", remedy))
    return [file]


def _by_key(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Positions in ascending order of key, the first of each key."""
    return np.unique(keys, return_index=True)[1].astype(np.int64)


def _no_column(where: str, name: str, place: str, raw: Mapping[str, Any]) -> str:
    is_null = name in raw
    rule = f"{place} has {'nothing in that column' if is_null else 'no such column'}; its columns: {', '.join(raw)}"
    return problem(where, name, rule, "" if is_null else did_you_mean(name, list(raw)))


def _without_nulls(message: Any) -> Any:
    return {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message
