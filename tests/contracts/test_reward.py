"""What every reward promises, over all that the folder has."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide import plugins
from ebbtide.config import validate
from ebbtide.rewards.base import RewardConfig, RewardInput
from ebbtide.rewards.scoring import Rewards
from ebbtide.types import StopReason

SUM = {"question": "1 + 1 = ?", "answer": "2", "metadata": {}, "reasoning_gym": {"task": "chain_sum", "params": {}}}


def _function(folder: Path) -> dict[str, Any]:
    path = folder / "my_rewards.py"
    path.write_text(
        "def same(completions, answer, **columns):\n"
        "    return [float(text == right) for text, right in zip(completions, answer)]\n"
    )
    return {"path": f"{path}:same"}


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "exact": lambda _folder: {},
    "function": _function,
    "math": lambda _folder: {},
    "reasoning_gym": lambda _folder: {},
}
"""Settings under which `2` answers the row SUM and `3` does not."""


def _input(text: str) -> RewardInput:
    return RewardInput(prompt="1 + 1 = ?", text=text, row=SUM, num_tokens=len(text), stop_reason=StopReason.EOS)


@pytest.fixture(params=plugins.names("rewards"))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> RewardConfig:
    assert request.param in MAKERS, f"add settings for reward {request.param!r} to this contract"
    cls = plugins.load("rewards", request.param)
    checked = validate(cls.Config, {"type": request.param, **MAKERS[request.param](tmp_path)})
    assert isinstance(checked, RewardConfig)
    return checked


def test_right_is_one_and_wrong_is_less_in_the_order_given(config: RewardConfig) -> None:
    reward = plugins.load("rewards", config.type)(config)
    scores = [float(value) for value in reward([_input("2"), _input("3"), _input(""), _input("2")])]
    assert scores[0] == scores[3] == 1
    assert 0 <= scores[1] < 1
    assert 0 <= scores[2] < 1
    assert list(reward([])) == []


def test_a_reward_does_not_change_the_row(config: RewardConfig) -> None:
    before = pickle.dumps(SUM)
    plugins.load("rewards", config.type)(config)([_input("2"), _input("x")])
    assert pickle.dumps(SUM) == before


def test_it_scores_in_its_process_what_it_scores_here(config: RewardConfig) -> None:
    inputs = [_input(text) for text in ("2", "3", "", "two", "2 ", "\u00e9\U0001f600\x00", "1" * 5000)]
    here = [float(value) for value in plugins.load("rewards", config.type)(config)(inputs)]
    with Rewards([config]) as rewards:
        (item,) = rewards
        outcome: Any = item.worker.call(inputs, 60)
        assert outcome.values == here


def test_it_is_called_by_name_or_by_the_name_given(config: RewardConfig) -> None:
    assert config.label == {"function": "same"}.get(config.type, config.type)
    assert config.model_copy(update={"name": "other"}).label == "other"
    assert config.weight == 1
