"""What every benchmark shares: flags, figures with their spread and target, a table, one JSON object, a baseline.

run = Run("weightsync", __doc__)            # parses --quick, --json, --baseline, --machine
run.figure("ratio_memcpy", [0.71, 0.69], ">= 0.6")
run.figure("ratio_peer", None, ">= 2.5")    # the peer is not installed: null, never a remembered number
raise SystemExit(run.finish())
"""

import argparse
import json
import operator
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Figure", "Run", "machine_name"]

ROOT = Path(__file__).resolve().parent.parent
BASELINES = ROOT / "benchmarks" / "baselines"
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Figure:
    """One measured quantity; every field but `n` is None where nothing could be measured.

    Attributes:
        median, min, max: over the repetitions, in the unit that ends the figure's name.
        n: repetitions.
        target: a comparison such as ">= 0.6", or None where the figure has no bound.
        holds: whether the median meets the target.
    """

    median: float | None
    min: float | None
    max: float | None
    n: int
    target: str | None
    holds: bool | None

    @staticmethod
    def of(values: Sequence[float] | None, target: str | None) -> "Figure":
        """The figure of these repetitions."""
        if not values:
            return Figure(None, None, None, 0, target, None)
        median = statistics.median(values)
        return Figure(median, min(values), max(values), len(values), target, _holds(median, target))


class Run:
    """One execution of one benchmark.

    Args:
        name: the benchmark's name, which is its file's stem.
        text: shown by --help.
        add_flags: adds the benchmark's own flags to the parser.
    """

    def __init__(
        self, name: str, text: str | None = None, add_flags: Callable[[argparse.ArgumentParser], object] | None = None
    ) -> None:
        self.name = name
        self.figures: dict[str, Figure] = {}
        parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="a smaller run, within 60 s")
        parser.add_argument("--json", action="store_true", help="print the figures as one JSON line at the end")
        parser.add_argument("--baseline", action="store_true", help="keep the figures under benchmarks/baselines/")
        parser.add_argument("--machine", default=machine_name(), help="the machine's name (default: %(default)s)")
        if add_flags is not None:
            add_flags(parser)
        self.args = parser.parse_args()

    def figure(self, name: str, values: float | Sequence[float] | None, target: str | None = None) -> Figure:
        """Add one figure: its repetitions, a single value, or None where it could not be measured."""
        repetitions = [float(values)] if isinstance(values, int | float) else values
        self.figures[name] = Figure.of(repetitions, target)
        return self.figures[name]

    def finish(self) -> int:
        """Print the table (and the JSON line), keep the baseline where asked; 1 if a target does not hold, else 0."""
        self._print_table()
        record = {
            "benchmark": self.name,
            "machine": self.args.machine,
            "commit": _commit(),
            "command": _command(),
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
        }
        if self.args.baseline:
            BASELINES.mkdir(parents=True, exist_ok=True)
            path = BASELINES / f"{self.name}_{self.args.machine}.json"
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(f"kept as {path.relative_to(ROOT)}")
        if self.args.json:
            print(json.dumps(record))
        return int(any(figure.holds is False for figure in self.figures.values()))

    def _print_table(self) -> None:
        print(f"\n{self.name} on {self.args.machine}")
        width = max((len(name) for name in self.figures), default=0)
        for name, figure in self.figures.items():
            target = "" if figure.target is None else f"target {figure.target}"
            verdict = {True: "holds", False: "DOES NOT HOLD", None: ""}[figure.holds]
            spread = f"[{_text(figure.min)}, {_text(figure.max)}]"
            print(f"  {name:<{width}}  {_text(figure.median):>10}  {spread:>24}  n={figure.n:<4} {target} {verdict}")


def machine_name() -> str:
    """A short name of this machine's kind, such as `2cpu_epyc` or `1gpu_h200`.

    The GPU is asked of the driver's command, so that no benchmark needs torch to know where it runs.
    """
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")
        gpus = [name.strip() for name in names if name.strip()]
    except (OSError, subprocess.SubprocessError):
        gpus = []
    if gpus:
        words = re.sub(r"(?i)nvidia|geforce|tesla", "", gpus[0]).split()
        return f"{len(gpus)}gpu_{words[0].lower()}"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpus}cpu_{_cpu_kind()}"


def _cpu_kind() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else platform.processor()
    for kind in ("EPYC", "Xeon", "Ryzen", "Core", "Graviton", "Apple"):
        if kind in text:
            return kind.lower()
    return platform.machine().lower()


def _holds(median: float, target: str | None) -> bool | None:
    if target is None:
        return None
    compare, bound = target.split()
    return _COMPARE[compare](median, float(bound))


def _commit() -> str:
    """The commit, with `+` where tracked files differ from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


def _command() -> str:
    return shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
