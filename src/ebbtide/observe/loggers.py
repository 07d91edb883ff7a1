"""All loggers of a run as one; one that fails is reported once and never ends the run."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide import plugins
from ebbtide.config import Component
from ebbtide.observe.sinks.base import Sink

__all__ = ["Loggers"]

_log = logging.getLogger(__name__)


class Loggers:
    """Opens the loggers that a recipe names and hands each step to all of them.

    Args:
        configs: one a logger.
        folder: of the run.
        recipe: the resolved recipe as a nested mapping.

    Raises:
        ConfigError: one cannot begin.
        MissingExtraError: the package of one is not installed.
    """

    def __init__(self, configs: Sequence[Component], folder: Path, recipe: Mapping[str, Any]) -> None:
        self._sinks: dict[str, Sink] = {}
        self._failing: set[str] = set()
        try:
            for number, config in enumerate(configs):
                sink = plugins.load("observe.sinks", config.type)(config, folder=folder, recipe=recipe)
                self._sinks[f"{config.type} (observe.sinks.{number})"] = sink
        except BaseException:
            self.close()
            raise

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a step on. A logger that cannot take it is asked again at the next one."""
        for name, sink in self._sinks.items():
            try:
                sink.write(step, metrics)
            except OSError as error:
                if name not in self._failing:
                    _log.warning("%s cannot write, and training goes on: %s", name, error)
                self._failing.add(name)
            else:
                self._failing.discard(name)

    def close(self) -> None:
        """Close all; calling it again does nothing."""
        while self._sinks:
            name, sink = self._sinks.popitem()
            try:
                sink.close()
            except OSError as error:
                _log.warning("%s could not write its last steps: %s", name, error)
