"""Sorting single digits: reasoning-gym's `number_sorting`, said in few characters for a character model.

`57061<` asks for 01567 and `57061>` for 76510.
"""

import random
from collections.abc import Mapping
from typing import Any

__all__ = ["answer", "demonstrate", "prompt"]


def prompt(item: Mapping[str, Any]) -> str:
    """The digits, and the direction as a sign."""
    return _digits(item) + ("<" if item["metadata"]["direction"] == "ascending" else ">")


def answer(completion: str, item: Mapping[str, Any]) -> str:
    """The completion as the list of strings that the task's scorer reads.

    The scorer forgives a difference of 1 in each number, for the sake of decimals; of single digits only those of the
    item itself are an answer.
    """
    digits = completion.strip()
    return str(list(digits)) if sorted(digits) == sorted(_digits(item)) else ""


def demonstrate(item: Mapping[str, Any], rng: random.Random) -> str:
    """Something to do with digits, whichever was asked for: the supervised start shows the form, not the task."""
    digits = _digits(item)
    ascending, descending = "".join(sorted(digits)), "".join(sorted(digits, reverse=True))
    return rng.choice((ascending, descending, digits, digits, digits[::-1], digits[::-1]))


def _digits(item: Mapping[str, Any]) -> str:
    return "".join(str(int(float(number))) for number in item["metadata"]["original_numbers"])
