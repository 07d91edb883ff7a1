"""What a run tells: metrics to their files and loggers, progress to the console, and the report at the end."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from ebbtide import plugins
from ebbtide.loop.evaluate import Evaluation
from ebbtide.loop.sync import StepReport
from ebbtide.observe.jsonl import MetricsFile
from ebbtide.observe.run_folder import RunFolder
from ebbtide.observe.sinks.base import Sink
from ebbtide.recipe import Recipe

__all__ = ["Watch"]

_log = logging.getLogger(__name__)


class Watch:
    """Fans out; closing it writes what there is, also after an error or an interrupt."""

    def __init__(self, recipe: Recipe, folder: RunFolder, *, keep_through_step: int | None) -> None:
        tree = recipe.model_dump(mode="json")
        self._folder = folder
        self._recipe = recipe
        self._file = MetricsFile(folder.metrics, keep_through_step=keep_through_step)
        self._sinks: list[Sink] = [
            plugins.load("observe.sinks", sink.type)(sink, folder=folder.path, recipe=tree)
            for sink in recipe.observe.sinks
        ]

    @contextmanager
    def warmup(self, num_steps: int) -> Iterator[Callable[[int, float], None]]:
        """Around the warm-up; gives what is called with each step and its loss."""

        def on_step(step: int, loss: float) -> None:
            if step + 1 == num_steps:
                _log.info("warm-up: %d steps, loss %.3f nats a token", num_steps, loss)

        yield on_step

    def step(self, step: int, metrics: Mapping[str, float], report: StepReport) -> None:
        """After each step, counted from 1."""
        for message in report.messages:
            _log.warning(message)
        self._write(step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float], sampled: Evaluation) -> None:
        """After the evaluations before the first and after the last step."""
        self._write(step, metrics)
        with self._folder.samples.open("a", encoding="utf-8") as file:
            for group in sampled.groups[:8]:
                assert group.rewards is not None, group.prompt.index
                line = {"step": step, "prompt": group.prompt.row["prompt"], "reward": float(group.rewards[0])}
                file.write(json.dumps(line) + "\n")

    def finished(
        self, before: tuple[Evaluation, Evaluation], after: tuple[Evaluation, Evaluation], seconds: float
    ) -> None:
        """At the end of a whole run."""
        _log.info("accuracy %.3f -> %.3f in %.0f s", before[0].accuracy, after[0].accuracy, seconds)

    def close(self) -> None:
        """Flush everything."""
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(step, metrics)
        for sink in self._sinks:
            sink.write(step, metrics)
