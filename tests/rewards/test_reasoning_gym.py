"""reasoning-gym's scorer, found from the row."""

from typing import Any

import pytest

from ebbtide.config import validate
from ebbtide.data.sources.reasoning_gym import ReasoningGymSource
from ebbtide.errors import ConfigError, DataError, RewardError
from ebbtide.rewards.base import RewardInput
from ebbtide.rewards.reasoning_gym import ReasoningGymReward
from ebbtide.types import StopReason

TASK = "recipes/quickstart_task.py"
SORTING = {"min_numbers": 5, "max_numbers": 5, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 9}


def _reward(**settings: Any) -> ReasoningGymReward:
    return ReasoningGymReward(validate(ReasoningGymReward.Config, settings))


def _input(text: str, row: Any) -> RewardInput:
    return RewardInput(row.get("prompt"), text, row, len(text), StopReason.EOS)


def _source(task: str, **settings: Any) -> ReasoningGymSource:
    return ReasoningGymSource(validate(ReasoningGymSource.Config, {"task": task, **settings}), seed=0)


def test_the_quickstart_answer_is_right_in_the_direction_asked_for() -> None:
    source = _source("number_sorting", params=SORTING, prompt=f"{TASK}:prompt")
    reward = _reward(answer=f"{TASK}:answer")
    for index in range(30):
        row = source[index]
        digits, direction = row["prompt"][:-1], row["prompt"][-1]
        right = "".join(sorted(digits, reverse=direction == ">"))
        scores = reward([_input(text, row) for text in (right, right + "\n", right[:-1], right + "0", "", "x" * 5)])
        assert scores == [1, 1, 0, 0, 0, 0]
        if abs(int(right[0]) - int(right[-1])) > 1:
            assert reward([_input(right[::-1], row)]) == [0]


def test_tasks_are_told_apart_within_one_call() -> None:
    rows = [_source("chain_sum")[0], _source("letter_counting")[0], _source("chain_sum")[1]]
    inputs = [_input(row["answer"], row) for row in rows] + [_input("?", row) for row in rows]
    scores = _reward()(inputs)
    assert scores[:3] == [1, 1, 1]
    assert all(score < 0.1 for score in scores[3:])


def test_the_answer_is_taken_from_where_it_stands() -> None:
    row = _source("chain_sum")[0]
    text = f"Let me see. <answer>{row['answer']}</answer>"
    assert _reward(extract="answer_tag")([_input(text, row)]) == [1]
    assert _reward(extract="last_number")([_input(text, row)]) == [1]
    assert _reward(extract="boxed")([_input(text, row)])[0] < 0.1


def test_a_text_that_the_scorer_chokes_on_is_wrong_and_a_broken_row_is_an_error() -> None:
    """The scorer of prime_factorization takes int() of whatever it is given."""
    row = dict(_source("prime_factorization")[0])
    assert _reward()([_input("x", row), _input(row["answer"], row)]) == [0, 1]
    with pytest.raises(ValueError, match="invalid literal"):
        _reward()([_input("2", {**row, "answer": "not a product"})])


def test_a_row_of_another_source_is_refused() -> None:
    with pytest.raises(DataError, match=r"row.reasoning_gym=None: .*data.type='reasoning_gym'"):
        _reward()([_input("x", {"answer": "x"})])
    with pytest.raises(ConfigError, match="no such task"):
        _reward()([_input("x", {"answer": "x", "reasoning_gym": {"task": "nonsense"}})])


def test_an_answer_function_must_return_text(tmp_path: Any) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def answer(completion, item):\n    return 3\n")
    with pytest.raises(RewardError, match=r"answer .*wrong.py:answer=3: must return text"):
        _reward(answer=f"{path}:answer")([_input("x", _source("chain_sum")[0])])


def test_equal_answers_of_a_row_are_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = ReasoningGymReward(ReasoningGymReward.Config())
    asked: list[str] = []

    def scored(completion: RewardInput) -> float:
        asked.append(completion.text)
        return float(completion.text)

    monkeypatch.setattr(reward, "_score", scored)
    rows: list[dict[str, object]] = [{"prompt": "a"}, {"prompt": "b"}]
    inputs = [RewardInput("", text, rows[r], 1, StopReason.EOS) for text, r in (("1", 0), ("2", 0), ("1", 0), ("1", 1))]
    assert reward(inputs) == [1.0, 2.0, 1.0, 1.0]
    assert asked == ["1", "2", "1"]
