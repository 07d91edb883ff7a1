"""A user's function: what it is given, in TRL's convention, and what may be done with it."""

from pathlib import Path
from typing import Any

import pytest

from ebbtide.config import validate
from ebbtide.errors import ConfigError
from ebbtide.rewards.base import RewardInput
from ebbtide.rewards.function import FunctionReward
from ebbtide.types import StopReason


def _reward(folder: Path, code: str, name: str = "score") -> FunctionReward:
    path = folder / "my_rewards.py"
    path.write_text(code)
    return FunctionReward(validate(FunctionReward.Config, {"path": f"{path}:{name}"}))


def _input(prompt: Any, text: str, **row: Any) -> RewardInput:
    return RewardInput(prompt, text, {"prompt": prompt, **row}, len(text), StopReason.EOS)


ECHO = "def score(**arguments):\n    return arguments\n"


def test_text_prompts_come_with_texts_and_columns_as_lists(tmp_path: Path) -> None:
    given = _reward(tmp_path, ECHO)([_input("p", "a", answer="1", level=3), _input("q", "bc", answer="2", level=4)])
    assert given == {
        "prompts": ["p", "q"],
        "completions": ["a", "bc"],
        "answer": ["1", "2"],
        "level": [3, 4],
        "num_tokens": [1, 2],
        "stop_reason": ["eos", "eos"],
    }


def test_chat_prompts_come_with_messages(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    given = _reward(tmp_path, ECHO)([_input(prompt, "a")])
    assert given["prompts"] == [prompt]
    assert given["completions"] == [[{"role": "assistant", "content": "a"}]]


def test_a_begun_answer_is_part_of_the_completion(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure, "}]
    given = _reward(tmp_path, ECHO)([_input(prompt, "a")])
    assert given["prompts"] == [[{"role": "user", "content": "q"}]]
    assert given["completions"] == [[{"role": "assistant", "content": "Sure, a"}]]
    assert len(prompt) == 2, "the row's own messages stay as they are"


def test_columns_that_only_some_rows_have(tmp_path: Path) -> None:
    given = _reward(tmp_path, ECHO)([_input("p", "a", answer="1"), _input("q", "b", hint="h")])
    assert (given["answer"], given["hint"]) == (["1", None], [None, "h"])


def test_a_column_of_the_data_goes_before_one_of_ours(tmp_path: Path) -> None:
    assert _reward(tmp_path, ECHO)([_input("p", "a", num_tokens=99)])["num_tokens"] == [99]


def test_a_function_without_columns_gets_what_it_names(tmp_path: Path) -> None:
    code = (
        "def score(completions, answer, weight=2.0):\n"
        "    return [weight * (c == a) for c, a in zip(completions, answer)]\n"
    )
    assert _reward(tmp_path, code)([_input("p", "1", answer="1", other=0), _input("p", "2", answer="1")]) == [2.0, 0.0]


def test_an_async_function_is_awaited(tmp_path: Path) -> None:
    code = "import asyncio\nasync def score(completions, **columns):\n    await asyncio.sleep(0)\n    return [1.0]\n"
    assert _reward(tmp_path, code)([_input("p", "1")]) == [1.0]


def test_a_module_of_the_users_own_and_a_callable_object(tmp_path: Path) -> None:
    code = (
        "class _Length:\n"
        "    def __call__(self, completions, **columns):\n"
        "        return [len(c) for c in completions]\n"
        "score = _Length()\n"
    )
    assert _reward(tmp_path, code)([_input("p", "abc")]) == [3]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nowhere.py:score", "no such file"),
        ("no_function_named", "must be 'path/to/file.py:name'"),
        ("no_such_package_at_all.rewards:score", "no such module"),
        ("math:sqroot", r"has no function 'sqroot'.*Did you mean 'sqrt'\?"),
    ],
)
def test_a_function_that_is_not_there_is_named(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FunctionReward(validate(FunctionReward.Config, {"path": path}))


def test_a_function_that_cannot_be_called_by_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes completions by position only"):
        _reward(tmp_path, "def score(completions, /):\n    return []\n")
