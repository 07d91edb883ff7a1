"""Whole runs of a recipe, each in a process of its own, and what their metrics say of the start and the end."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from _record import ROOT

__all__ = ["Ends", "ends", "read", "train"]

Rows = list[dict[str, float]]


@dataclass(frozen=True)
class Ends:
    """Held-out accuracy before the first update and after the last, as the policy samples and greedy."""

    sampled_before: float
    greedy_before: float
    sampled_after: float
    greedy_after: float


def train(recipe: str, folder: Path, *overrides: str) -> Rows:
    """Run `ebbtide train` on a recipe of this repository, into a folder; its metrics."""
    command = [sys.executable, "-m", "ebbtide", "train", f"recipes/{recipe}.toml", "--folder", str(folder), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{recipe} failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return read(folder)


def read(folder: Path) -> Rows:
    """The metrics of a run, one mapping a line."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def ends(rows: Rows) -> Ends:
    """The first and the last evaluation that have greedy accuracy as well."""
    whole = [row for row in rows if "eval/greedy_accuracy" in row]
    first, last = whole[0], whole[-1]
    return Ends(
        first["eval/accuracy"], first["eval/greedy_accuracy"], last["eval/accuracy"], last["eval/greedy_accuracy"]
    )
