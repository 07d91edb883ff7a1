"""Sums and differences of two numbers of one or two digits: reasoning-gym's `basic_arithmetic` as a chat.

Two turns before the question show the form of an answer, so that neither form nor length decides the score, but the
number alone.
"""

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["answer", "prompt"]

_SHOWN = (("7 + 5", "7 + 5 = 12"), ("64 - 8", "64 - 8 = 56"))


def prompt(item: Mapping[str, Any]) -> list[dict[str, str]]:
    """Chat messages: what to do, two answered questions, and the question."""
    messages = [{"role": "system", "content": "You are a calculator."}]
    for question, reply in _SHOWN:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return [*messages, {"role": "user", "content": item["metadata"]["expression"]}]


def answer(completion: str, item: Mapping[str, Any]) -> str:  # noqa: ARG001 every answer function gets the item
    """The last number of the completion, wherever it stands."""
    numbers = re.findall(r"(?<![\w.])-?\d+", completion)
    return numbers[-1] if numbers else ""
