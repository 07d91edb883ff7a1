"""Sums and differences of two numbers of one or two digits: reasoning-gym's `basic_arithmetic` as a chat.

One answered question before the real one shows the form, so that neither form nor length decides the score, but the
number alone.
"""

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["answer", "prompt"]


def prompt(item: Mapping[str, Any]) -> list[dict[str, str]]:
    """Chat messages: what to do, an answered question, and the question."""
    return [
        {"role": "system", "content": "You are a calculator."},
        {"role": "user", "content": "64 - 8"},
        {"role": "assistant", "content": "64 - 8 = 56"},
        {"role": "user", "content": item["metadata"]["expression"]},
    ]


def answer(completion: str, item: Mapping[str, Any]) -> str:  # noqa: ARG001 every answer function gets the item
    """The last number of the completion, wherever it stands."""
    numbers = re.findall(r"(?<![\w.])-?\d+", completion)
    return numbers[-1] if numbers else ""
