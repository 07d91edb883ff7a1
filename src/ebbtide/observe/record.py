"""What a run folder tells about its run, read back."""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.observe.jsonl import read_metrics
from ebbtide.observe.run_folder import RunFolder

__all__ = ["Run", "finite", "memory_kind", "read_run"]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run folder holds.

    Attributes:
        recipe_text: the resolved recipe, as TOML.
        environment: versions and machine.
        rows: the metrics of each step, ascending; lines of one step are one row.
        samples: `step`, `prompt`, `completion` and `reward` of some completions.
    """

    recipe_text: str
    environment: Mapping[str, Any]
    rows: Sequence[Mapping[str, float]]
    samples: Sequence[Mapping[str, Any]]

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as a tree."""
        return tomllib.loads(self.recipe_text)

    def column(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of the rows that have the key."""
        pairs = [(row["step"], row[key]) for row in self.rows if key in row]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def phases(self) -> list[str]:
        """Phases that are no part of another one, the longest first."""
        totals: dict[str, float] = {}
        for row in self.rows:
            for key, value in row.items():
                name = key.removeprefix("time/").removesuffix("_s")
                is_phase = key.startswith("time/") and "." not in name and not name.endswith("_clean_up")
                if is_phase and name != "step" and math.isfinite(value):
                    totals[name] = totals.get(name, 0.0) + value
        return sorted(totals, key=totals.__getitem__, reverse=True)


def read_run(folder: RunFolder) -> Run:
    """What the folder holds at this moment.

    Raises:
        DataError: `metrics.jsonl` holds something else than metrics.
    """
    rows: dict[float, dict[str, float]] = {}
    for row in read_metrics(folder.metrics):
        rows.setdefault(row["step"], {}).update(row)
    environment = json.loads(folder.environment.read_text(encoding="utf-8")) if folder.environment.is_file() else {}
    recipe_text = folder.recipe.read_text(encoding="utf-8") if folder.recipe.is_file() else ""
    return Run(recipe_text, environment, list(rows.values()), list(_samples(folder.samples)))


def memory_kind(run: Run) -> tuple[str, str]:
    """Which memory is the scarce one: the device's where there is one."""
    on_device = any(key.endswith("_peak_allocated_bytes") for row in run.rows for key in row)
    return ("allocated", "allocated on the device") if on_device else ("rss", "resident on the host")


def finite(values: Sequence[float]) -> list[float]:
    """Those that are numbers."""
    return [value for value in values if math.isfinite(value)]


def _samples(path: Path) -> Iterator[Mapping[str, Any]]:
    """Whole lines alone; a kill or a full disk may have broken one off."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
