"""What a run tells: metrics to their file and loggers, progress to the console, samples and report to the folder."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from ebbtide.errors import RunFolderError
from ebbtide.loop.evaluate import Evaluation
from ebbtide.observe.console import Console
from ebbtide.observe.jsonl import MetricsFile
from ebbtide.observe.loggers import Loggers
from ebbtide.observe.metrics import check
from ebbtide.observe.report import write_report
from ebbtide.observe.run_folder import RunFolder
from ebbtide.recipe import Recipe
from ebbtide.units import format_seconds

__all__ = ["Watch"]

_log = logging.getLogger(__name__)
_NUM_SAMPLES = 8


class Watch:
    """Fans out; closing it flushes what there is, also after an error or an interrupt."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        decode: Callable[[list[int]], str],
        *,
        keep_through_step: int | None = None,
    ) -> None:
        """decode: token ids to text. keep_through_step: the last step of an earlier part of the run that counts."""
        self._folder = folder
        self._decode = decode
        self._console = Console(progress=recipe.observe.progress)
        self._file = MetricsFile(folder.metrics, keep_through_step=keep_through_step)
        self._loggers = Loggers(recipe.observe.sinks, folder.path, recipe.model_dump(mode="json"))
        self._show: Callable[[int, Mapping[str, float]], None] | None = None

    @contextmanager
    def stage(self, name: str, num_steps: int, *, done: int = 0) -> Iterator[None]:
        """Around a stage of the run, for the console."""
        with self._console.stage(name, num_steps, done=done) as self._show:
            try:
                yield
            finally:
                self._show = None

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Progress alone: nothing is kept."""
        if self._show is not None:
            self._show(step, metrics)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Progress, and to all loggers."""
        check(metrics)
        self._file.write(step, metrics)
        self._loggers.write(step, metrics)
        self.show(step, metrics)

    def warn(self, message: str) -> None:
        """Something went wrong that does not end the run."""
        _log.warning(message)

    def samples(self, step: int, evaluation: Evaluation) -> None:
        """Keep a few held-out completions, for a person to read."""
        lines = []
        for group in evaluation.groups[:_NUM_SAMPLES]:
            assert group.rewards is not None, group.prompt.index
            line = {
                "step": step,
                "prompt": group.prompt.row["prompt"],
                "completion": self._decode(group.completions[0].token_ids.tolist()),
                "reward": float(group.rewards[0]),
            }
            lines.append(json.dumps(line) + "\n")
        try:
            with self._folder.samples.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:  # a full disk, say; a few answers are not worth a run
            _log.warning("%s could not be written: %s", self._folder.samples, error)

    def finished(
        self, before: tuple[Evaluation, Evaluation], after: tuple[Evaluation, Evaluation], seconds: float
    ) -> None:
        """The table at the end of a whole run."""
        names = ("as it samples", "greedy")
        rows = [[name, _share(first), _share(last)] for name, first, last in zip(names, before, after, strict=True)]
        self._console.table("Held-out accuracy", ["", "before", "after"], rows)
        self._console.line(f"\n{format_seconds(seconds)} in all. Curves: {self._folder.report}")
        self._console.line(f"Weights: {self._folder.final}")

    def close(self) -> None:
        """Flush everything, and tell the run on a page, however it ended."""
        try:
            self._loggers.close()
        finally:
            try:
                self._file.close()
            finally:
                self._report()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except RunFolderError as lost:  # what ended the run matters more than its last metrics
            _log.error("%s", lost)

    def _report(self) -> None:
        try:
            write_report(self._folder)
        except OSError as error:  # a full disk, say; `ebbtide report` makes it later
            _log.warning("%s could not be written: %s", self._folder.report, error)


def _share(evaluation: Evaluation) -> str:
    low, high = evaluation.interval
    return f"{evaluation.accuracy:6.1%} [{low:.1%}, {high:.1%}] of {evaluation.num_prompts}"
