"""Exact match: folding, lists of answers, numbers."""

from typing import Any

import pytest

from ebbtide.config import validate
from ebbtide.errors import DataError
from ebbtide.rewards.base import RewardInput
from ebbtide.rewards.exact import ExactReward
from ebbtide.types import StopReason


def _score(text: str, answer: Any, **settings: Any) -> float:
    reward = ExactReward(validate(ExactReward.Config, settings))
    return reward([RewardInput("q", text, {"answer": answer}, 1, StopReason.EOS)])[0]


@pytest.mark.parametrize(
    ("text", "answer", "settings", "expected"),
    [
        ("42", "42", {}, 1),
        (" 42\n", "42", {}, 1),
        (" 42\n", "42", {"strip": False}, 0),
        ("42", 42, {}, 1),
        ("42.", "42", {}, 0),
        ("Paris", "paris", {}, 0),
        ("Paris", "paris", {"ignore_case": True}, 1),
        ("STRASSE", "stra\u00dfe", {"ignore_case": True}, 1),
        ("b", ["a", "b"], {}, 1),
        ("c", ["a", "b"], {}, 0),
        ("", "", {}, 1),
        ("5.0", "5", {}, 0),
        ("5.0", "5", {"numeric": True}, 1),
        ("1,000", 1000, {"numeric": True}, 1),
        ("1e3", "1000", {"numeric": True}, 1),
        ("five", "5", {"numeric": True}, 0),
        ("nan", "nan", {"numeric": True}, 1),
        ("nan", "5", {"numeric": True}, 0),
        ("sNaN", "5", {"numeric": True}, 0),
        ("0.1", "0.1000000000000000000001", {"numeric": True}, 0),
        ("So it is 1,005.", "1005", {"extract": "last_number"}, 1),
        ("So it is 1005.", "20 * 50 = 1000\n#### 1,005", {"extract": "last_number"}, 1),
        ("no number", "1005", {"extract": "last_number"}, 0),
        (r"\boxed{x}", "x", {"extract": "boxed"}, 1),
    ],
)
def test_what_is_equal(text: str, answer: Any, settings: dict[str, Any], expected: float) -> None:
    assert _score(text, answer, **settings) == expected


def test_a_row_without_an_answer_is_an_error_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"row.answer=None: .*data.answer_column"):
        _score("x", None)
