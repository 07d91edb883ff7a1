"""The contract of a source: a fixed, indexed collection of rows, the same on every start with the same seed.

Which prompts are held out depends on their content alone, never on their position or on the seed: a prompt that
occurs twice is on one side both times, and a checkpoint trained with one seed may be evaluated under another.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Protocol

from ebbtide.config import Component
from ebbtide.errors import DataError, problem

__all__ = ["Demonstrates", "Row", "Source", "SourceConfig", "check_prompt", "content_key", "is_held_out"]

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
        """Rows for evaluation, all of different prompts; no prompt of theirs is ever returned by `__getitem__`.

        The first rows of a longer list are those of a shorter one.

        Raises:
            DataError: fewer than `num_rows` are there.
        """
        ...


class Demonstrates(Protocol):
    """A source that can also show completions, for a supervised start."""

    def demonstration(self, index: int) -> str:
        """A completion for row `index`, the same at every call; not necessarily a good one.

        Raises:
            DataError: the source was not told where its demonstrations are.
        """
        ...


def check_prompt(prompt: object, where: Callable[[], str]) -> None:
    """Refuse what is neither text nor chat messages.

    Raises:
        DataError: the message starts with `where()`, which is called for it alone.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(problem(where(), prompt, "a prompt must not be empty"))
        return
    is_chat = (
        isinstance(prompt, list | tuple)
        and len(prompt) > 0
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in prompt
        )
    )
    if not is_chat:
        shown = prompt if len(repr(prompt)) <= 200 else f"{repr(prompt)[:200]}..."
        rule = "a prompt is text, or a list of chat messages that each have a role and a content, both text"
        raise DataError(problem(where(), shown, rule, "Name another column with prompt_column, or mend the data"))


def content_key(prompt: Any) -> int:
    """64 bits that are equal for prompts of equal content, and only by accident for others.

    White space is folded and system messages are left out, so that a prompt and its thin disguises stay together.

    Example:
        >>> content_key("2 + 2 =") == content_key([{"role": "user", "content": "2 + 2  = "}])
        True
    """
    if isinstance(prompt, str):
        text = " ".join(prompt.split())
    else:
        turns = [message for message in prompt if message["role"] != "system"] or list(prompt)
        parts = [(turn["role"], " ".join(turn["content"].split())) for turn in turns]
        is_plain = len(parts) == 1 and parts[0][0] == "user"
        text = parts[0][1] if is_plain else "\0".join(part for pair in parts for part in pair)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def is_held_out(key: int, fraction: float) -> bool:
    """Whether a prompt of this content key belongs to the held-out share."""
    return key < fraction * 2.0**64
