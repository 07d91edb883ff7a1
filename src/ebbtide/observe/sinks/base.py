"""The contract of a logger."""

from collections.abc import Mapping
from typing import Protocol

from ebbtide.config import Component

__all__ = ["Sink", "SinkConfig"]


class SinkConfig(Component):
    """Base of every logger's `Config`."""


class Sink(Protocol):
    """Takes the metrics of each step.

    A sink is made as `Sink(config, folder=run_folder, recipe=resolved_recipe_as_a_nested_dict)`.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; keys are those of `ebbtide.observe.metrics`."""
        ...

    def close(self) -> None:
        """Flush and release; calling it again does nothing."""
        ...
