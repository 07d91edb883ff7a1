"""Answers as mathematics; and that nothing a model writes takes for ever."""

import threading
import time
from typing import Any

import pytest

from ebbtide.config import validate
from ebbtide.errors import DataError
from ebbtide.rewards.base import RewardInput
from ebbtide.rewards.math import MathReward
from ebbtide.types import StopReason


def _reward(**settings: Any) -> MathReward:
    return MathReward(validate(MathReward.Config, settings))


def _input(text: str, answer: Any) -> RewardInput:
    return RewardInput("q", text, {"answer": answer}, 1, StopReason.EOS)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"The answer is $\boxed{\frac{1}{2}}$", "0.5", 1),
        ("so 1/2", r"\frac{1}{2}", 1),
        ("it is 42.", 42, 1),
        ("1,005", "1005", 1),
        ("it is 41.", "42", 0),
        (r"$\boxed{x^2 + 2x + 1}$", "(x+1)^2", 1),
        (r"$\{2, 1\}$", r"\{1,2\}", 1),
        ("the answer is $5$", r"Thus the answer is $\boxed{5}$", 1),
        ("(A, B)", "(A, B)", 1),
        ("nothing to see", "3", 0),
        ("", "3", 0),
        (r"$\boxed{", "3", 0),
        ("\\" * 50 + "{" * 50, "3", 0),
    ],
)
def test_what_is_equal(text: str, answer: Any, expected: float) -> None:
    assert _reward()([_input(text, answer)]) == [expected]


def test_only_the_part_named_counts() -> None:
    reward = _reward(extract="answer_tag")
    assert reward([_input("<answer>1/2</answer> or 3", "0.5"), _input("0.5", "1/2")]) == [1, 0]


@pytest.mark.parametrize("text", [r"$9^{9^{9^9}}$", r"\boxed{2^{2^{100}}}", r"$\sum_{i=1}^{10^{9}} i^i$"])
def test_an_endless_comparison_is_wrong_and_the_next_completion_is_judged(text: str) -> None:
    """Without a limit of its own each of these runs for hours."""
    started = time.monotonic()
    assert _reward(completion_limit_s=0.3)([_input(text, "3"), _input("3", "3")]) == [0, 1]
    assert time.monotonic() - started < 30


def test_it_works_beside_threads() -> None:
    """math-verify's own timeouts raise here; the reward has none on a thread, and is bounded by its process."""
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.extend(_reward()([_input("1/2", "0.5")])))
    thread.start()
    thread.join()
    assert scores == [1]


@pytest.mark.parametrize(("answer", "text"), [(None, "row.answer=None"), ("", "math-verify finds no expression")])
def test_a_row_that_cannot_be_compared_with_is_an_error(answer: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        _reward()([_input("3", answer)])
