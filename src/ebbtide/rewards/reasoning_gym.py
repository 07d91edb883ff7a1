"""reasoning-gym's own scorer, of the task that a row comes from."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebbtide import plugins
from ebbtide.errors import ConfigError, DataError, RewardError, problem
from ebbtide.rewards.base import RewardConfig, RewardInput, each_answer_once
from ebbtide.rewards.extraction import ExtractionSection, extractor

__all__ = ["ReasoningGymReward"]

# What some scorers raise, and most take for a wrong answer, where a text cannot be read as one.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class ReasoningGymReward:
    """The task's `score_answer`, from 0 to 1; for many tasks only 1 is right and a wrong answer may get a little.

    Source: reasoning-gym (arXiv 2505.24760), `ProceduralDataset.score_answer`.
    """

    class Config(RewardConfig, ExtractionSection):
        """How a completion becomes the answer that the scorer sees."""

        type: str = "reasoning_gym"
        answer: str | None = None
        """`file.py:function` from (extracted text, item) to the answer in the scorer's form; None leaves the text."""

    def __init__(self, config: Config) -> None:
        self._extract = extractor(config)
        self._answer_reference = config.answer
        self._answer: Callable[[str, Mapping[str, Any]], Any] | None = None
        if config.answer is not None:
            self._answer = plugins.load_function(config.answer)
        self._scorers: dict[str, Callable[[str | None, Any], float]] = {}
        self._last_origin: Any = None
        self._last_scorer: Callable[[str | None, Any], float] | None = None

    def __call__(self, completions: Sequence[RewardInput]) -> list[float]:
        """One score a completion."""
        return each_answer_once(completions, self._score)

    def _score(self, completion: RewardInput) -> float:
        row = completion.row
        answer = self._extract(completion.text)
        if answer is not None and self._answer is not None:
            answer = self._answer(answer, row)
            if not isinstance(answer, str):
                raise RewardError(problem(f"answer {self._answer_reference}", answer, "must return text"))
        scorer = self._scorer(row)
        try:
            return float(scorer(answer, row))
        except _UNREADABLE:
            scorer(row.get("answer"), row)  # raises again if it is the row, and not the completion, that is at fault
            return 0.0

    def _scorer(self, row: Mapping[str, Any]) -> Callable[[str | None, Any], float]:
        origin = row.get("reasoning_gym")
        if self._last_scorer is not None and origin is self._last_origin:
            return self._last_scorer
        if not isinstance(origin, Mapping) or not isinstance(origin.get("task"), str):
            rule = "a row without the column reasoning_gym has no scorer"
            raise DataError(
                problem("row.reasoning_gym", origin, rule, "Use data.type='reasoning_gym' with this reward")
            )
        params = origin.get("params", {})
        key = json.dumps([origin["task"], params], sort_keys=True, default=repr)
        if key not in self._scorers:
            self._scorers[key] = _load_scorer(origin["task"], params)
        self._last_origin, self._last_scorer = origin, self._scorers[key]
        return self._last_scorer


def _load_scorer(task: str, params: Mapping[str, Any]) -> Callable[[str | None, Any], float]:
    from reasoning_gym.factory import DATASETS, create_dataset  # a second of imports, only where used

    if task not in DATASETS:
        raise ConfigError(problem("row.reasoning_gym.task", task, "reasoning-gym has no such task"))
    # Scorers read the parameters alone, never the items, so the smallest set will do.
    scorer: Callable[[str | None, Any], float] = create_dataset(task, seed=0, size=1, **params).score_answer
    return scorer
