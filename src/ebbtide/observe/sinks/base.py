"""The contract of a logger, and what loggers share.

A logger that cannot begin is an error before the run begins. One that cannot write later never ends the run: it raises
OSError, which is reported once, and training goes on.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from ebbtide.config import Component
from ebbtide.errors import MissingExtraError, problem

__all__ = ["Sink", "SinkConfig", "import_extra"]


class SinkConfig(Component):
    """Base of every logger's `Config`."""


class Sink(Protocol):
    """Takes the metrics of each step.

    A sink is made as `Sink(config, folder=run_folder, recipe=resolved_recipe_as_a_nested_dict)`. Making it checks that
    its package and its server are there, before anything is trained; a resumed run goes on where an earlier part ended.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; keys are those of `ebbtide.observe.metrics`. Steps never go back; one may come twice.

        Raises:
            OSError: the logger could not take it.
        """
        ...

    def close(self) -> None:
        """Flush and release; calling it again does nothing.

        Raises:
            OSError: the logger could not take what was left.
        """
        ...


def import_extra(module: str, extra: str) -> ModuleType:
    """A module of an optional package.

    Raises:
        MissingExtraError: it is not installed; has the line that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        rule, remedy = f"needs the package {extra}, which is not installed", f"pip install 'ebbtide[{extra}]'"
        raise MissingExtraError(problem("observe.sinks.type", extra, rule, remedy)) from error
