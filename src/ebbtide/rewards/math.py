"""1 where the completion's final answer equals the row's as mathematics, by math-verify; else 0."""

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from pydantic import Field

from ebbtide.errors import DataError, problem
from ebbtide.rewards.base import RewardConfig, RewardInput, each_answer_once
from ebbtide.rewards.extraction import ExtractionSection, extractor

__all__ = ["MathReward"]

_MARKS = ("\\boxed", "$", "\\(", "\\[")


class MathReward:
    """Finds the last expression, in LaTeX or plain, and compares it by value, so that 1/2 and 0.5 are equal.

    Comparing what a model writes can take for ever, so that each completion has a limit of its own, beyond which it is
    wrong; that is the model's fault, not the reward's.

    Source: math-verify (huggingface/Math-Verify); here its timeouts are replaced, as they count whole seconds for each
    pair of expressions and do not work beside threads.
    """

    class Config(RewardConfig, ExtractionSection):
        """Where the answer stands, and how long looking at it may take."""

        type: str = "math"
        time_limit_s: float = Field(300.0, gt=0)
        """Seconds that scoring one step's completions may take."""
        completion_limit_s: float = Field(2.0, gt=0)
        """Seconds for one completion; one that takes longer is scored 0."""

    def __init__(self, config: Config) -> None:
        from math_verify import parse, verify  # a second of imports, only where used

        for module in ("math_verify.grader", "math_verify.parser"):
            logging.getLogger(module).setLevel(logging.ERROR)  # they warn of having no timeout; ours stands around them
        self._extract = None if config.extract == "all" and config.pattern is None else extractor(config)
        self._limit_s = config.completion_limit_s
        self._verify = verify
        self._parse = parse
        self._gold = lru_cache(maxsize=4096)(self._parsed_gold)

    def __call__(self, completions: Sequence[RewardInput]) -> list[float]:
        """1.0 or 0.0 each.

        Raises:
            DataError: a row has no answer, or one in which math-verify finds nothing.
        """
        return each_answer_once(completions, self._score)

    def _score(self, completion: RewardInput) -> float:
        answer = completion.row.get("answer")
        if answer is None:
            remedy = "Name the column with data.answer_column"
            raise DataError(problem("row.answer", None, "a row without an answer cannot be compared with", remedy))
        gold = self._gold(str(answer))
        text = completion.text
        if text.strip() == str(answer).strip():
            return 1.0
        if self._extract is not None:
            found = self._extract(text)
            if found is None:
                return 0.0
            text = _marked(found)
        try:
            with _time_limit(self._limit_s):
                return float(self._verify(gold, self._parse(text, parsing_timeout=None), timeout_seconds=None))
        except _TimeUpError:
            return 0.0

    def _parsed_gold(self, answer: str) -> Any:
        parsed = self._parse(_marked(answer), parsing_timeout=None)
        if not parsed:
            raise DataError(problem("row.answer", answer, "math-verify finds no expression in it", "Mend the row"))
        return parsed


def _marked(answer: str) -> str:
    """A bare answer as one that is marked as LaTeX, which plain numbers are too."""
    return answer if any(mark in answer for mark in _MARKS) else f"\\boxed{{{answer}}}"


class _TimeUpError(BaseException):
    """Not an Exception, which math-verify and sympy would take for a failed attempt and go on."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise inside the block when time is up. Off the main thread there is no such signal, and no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise _TimeUpError

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
