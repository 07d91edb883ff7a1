"""What a person sees while a run goes on: a progress bar in a terminal, plain lines elsewhere, and a table at the end.

Everything goes through rich's one console, log messages included, so that they appear above the bar and not in it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import rich
from rich.console import Console as RichConsole
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ebbtide.units import format_bytes, format_count, format_seconds

__all__ = ["Console", "figures", "set_up_logging"]

_NUM_LINES = 20  # of a stage, where the output is no terminal
_REFRESHES_PER_S = 4  # each costs about a millisecond of the cores that train


def set_up_logging(level: int = logging.INFO, *, to_stderr: bool = False) -> None:
    """Send ebbtide's log messages to rich's console; calling it again replaces what was set.

    Args:
        level: of `logging`; less important messages are left out.
        to_stderr: what a person reads goes to standard error, so that standard output is free for a script.
    """
    if to_stderr:
        rich.reconfigure(stderr=True)
    console = rich.get_console()
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_time=False, markup=False)
    else:
        handler = _PlainHandler(console)
    logger = logging.getLogger("ebbtide")
    for earlier in list(logger.handlers):
        logger.removeHandler(earlier)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class Console:
    """Shows the stages of one run.

    Args:
        progress: draw a bar where the output is a terminal; lines otherwise.
        console: where to; rich's one console where not given.
    """

    def __init__(self, *, progress: bool = True, console: RichConsole | None = None) -> None:
        self._rich = console or rich.get_console()
        self._draws = progress and self._rich.is_terminal

    @contextmanager
    def stage(
        self, name: str, num_steps: int, *, done: int = 0
    ) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
        """Around one stage of the run; gives what is called with the steps done so far and the last one's metrics.

        Args:
            name: a word or two.
            num_steps: steps of the whole stage.
            done: steps that an earlier part of the run has done.
        """
        if self._draws:
            with self._bar() as progress:
                task = progress.add_task(name, total=num_steps, completed=done, figures="")
                yield lambda step, metrics: _advance(progress, task, step, metrics)
        else:
            yield _Lines(self._rich, name, num_steps).show

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; columns after the first are aligned to the right."""
        table = Table(
            title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
        )
        for number, name in enumerate(header):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        self._rich.print()
        self._rich.print(table)

    def line(self, text: str) -> None:
        """One line of plain text."""
        self._rich.print(Text(text), soft_wrap=True)

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _Steps(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self._rich,
            refresh_per_second=_REFRESHES_PER_S,
            expand=True,
        )


def figures(metrics: Mapping[str, float]) -> list[str]:
    """The few figures of a step that a person follows, those that are there, as `name value`.

    Example:
        >>> figures({"reward/mean": 0.5, "throughput/tokens_per_s": 12_300, "memory/update_peak_rss_bytes": 2**30})
        ['reward 0.500', '12.3k tok/s', '1.0 GiB']
    """
    found = []
    for key, text in (("warmup/loss_nats", "loss"), ("reward/mean", "reward"), ("reward/accuracy", "accuracy")):
        if key in metrics:
            found.append(f"{text} {metrics[key]:.3f}")
    for key, text in (("eval/accuracy", "held-out"), ("eval/greedy_accuracy", "held-out greedy")):
        if key in metrics:
            found.append(f"{text} {metrics[key]:.3f}")
    if "throughput/tokens_per_s" in metrics:
        found.append(f"{format_count(metrics['throughput/tokens_per_s'])} tok/s")
    for kind in ("allocated", "rss"):
        peaks = [value for key, value in metrics.items() if key.endswith(f"_peak_{kind}_bytes")]
        if peaks:
            found.append(format_bytes(max(peaks)))
            break
    return found


def _advance(progress: Progress, task: TaskID, step: int, metrics: Mapping[str, float]) -> None:
    progress.update(task, completed=step, figures="  ".join(figures(metrics)))


class _Steps(ProgressColumn):
    """`12/200`, as wide at the start as at the end."""

    def render(self, task: Task) -> Text:
        total = str(int(task.total or 0))
        return Text(f"{int(task.completed):>{len(total)}}/{total}", style="progress.download")


class _Lines:
    """A line at the first and the last step and about twenty times in between."""

    def __init__(self, console: RichConsole, name: str, num_steps: int) -> None:
        self._rich = console
        self._name = name
        self._num_steps = num_steps
        self._every = max(1, num_steps // _NUM_LINES)
        self._begin = time.monotonic()
        self._first: int | None = None

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        is_first = self._first is None
        if self._first is None:
            self._first = step - 1
        if not (is_first or step % self._every == 0 or step == self._num_steps):
            return
        seconds = time.monotonic() - self._begin
        left = seconds / max(1, step - self._first) * (self._num_steps - step)
        remaining = [f"{format_seconds(left)} left"] if step < self._num_steps else [f"took {format_seconds(seconds)}"]
        parts = [f"{self._name} {step}/{self._num_steps}", *figures(metrics), *remaining]
        self._rich.print(Text("  ".join(parts)), soft_wrap=True)


class _PlainHandler(logging.Handler):
    """Log messages as whole lines, with the level where it is more than information."""

    def __init__(self, console: RichConsole) -> None:
        super().__init__()
        self._rich = console

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._rich.print(Text(f"{level}{self.format(record)}"), soft_wrap=True)
