"""The contract of a source: a fixed, indexed collection of rows, the same on every start with the same seed."""

from collections.abc import Mapping
from typing import Any, Protocol

from ebbtide.config import Component

__all__ = ["Row", "Source", "SourceConfig"]

Row = Mapping[str, Any]
"""One row. `prompt` is text or a list of chat messages; other columns go to the rewards as they are."""


class SourceConfig(Component):
    """Base of every source's `Config`."""


class Source(Protocol):
    """Rows to train on, and rows held out that share no prompt with them.

    A source is made as `Source(config, seed=...)`.
    """

    def __len__(self) -> int:
        """Rows to train on."""
        ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`, the same at every call.

        Raises:
            DataError: the row lacks a column or has one of the wrong type; the message names file and row.
        """
        ...

    def held_out(self, num_rows: int) -> list[Row]:
        """Rows for evaluation; no prompt of theirs is ever returned by `__getitem__`.

        Raises:
            DataError: fewer than `num_rows` are there.
        """
        ...
