from typing import Annotated, Any

import pytest
from pydantic import Field

from ebbtide import config
from ebbtide.config import Choice, Component, Section
from ebbtide.errors import ConfigError
from tests.config.tree import Outer


def problems_of(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.validate(Outer, tree)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"stepz": 1}, "stepz=1: no such key. Did you mean 'steps'?"),
        ({"inner": {"rat": 1}}, "inner.rat=1: no such key. Did you mean 'inner.rate'?"),
        ({"maybe": {"rat": 1}}, "maybe.rat=1: no such key. Did you mean 'maybe.rate'?"),
        ({"many": [{}, {"nrom": 1}]}, "many.1.nrom=1: no such key. Did you mean 'many.1.norm'?"),
        ({"inner": {"zzz": 1}}, "inner.zzz=1: no such key. Known here: rate, norm, label."),
        (
            {"rewards": [{"type": "exact", "wieght": 2}]},
            "rewards.0.wieght=2: no such key. Did you mean 'rewards.0.weight'?",
        ),
        ({"reward": {"type": "exact", "wieght": 2}}, "reward.wieght=2: no such key. Did you mean 'reward.weight'?"),
        (
            {"reward": {"type": "exct"}},
            "reward.type='exct': no such reward; known: exact, function, math, reasoning_gym. Did you mean 'exact'?",
        ),
        ({"reward": {"type": "my.own"}}, "reward.type='my.own': no such module. Is its folder installed, or on PYTHON"),
        ({"reward": {"weight": 2}}, "reward={'weight': 2}: must be a table with a `type`; known types: exact, "),
        ({"reward": "exact"}, "reward='exact': must be a table with a `type`; known types: exact, "),
        ({"rewards": ["exact"]}, "rewards.0='exact': must be a table with a `type`; known types: exact, "),
        ({"rewards": {"type": "exact"}}, "rewards={'type': 'exact'}: must be a list."),
    ],
)
def test_a_misspelt_key_is_named_with_its_whole_path(tree: dict[str, Any], expected: str) -> None:
    found = problems_of({"steps": 1, **tree})
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"steps": "3"}, "steps='3': must be a whole number, without quotes."),
        ({"steps": True}, "steps=True: must be a whole number."),
        ({"steps": 3.0}, "steps=3.0: must be a whole number."),
        ({"steps": 0}, "steps=0: must be greater than or equal to 1."),
        ({"lr": "1e-6"}, "lr='1e-6': must be a number, without quotes."),
        ({"lr": True}, "lr=True: must be a number."),
        ({"lr": float("nan")}, "lr=nan: must be a finite number."),
        ({"lr": float("inf")}, "lr=inf: must be a finite number."),
        ({"on": 1}, "on=1: must be true or false."),
        ({"on": "true"}, "on='true': must be true or false, without quotes."),
        ({"mode": "c"}, "mode='c': must be 'a' or 'b'."),
        ({"words": "one"}, "words='one': must be a list."),
        ({"words": ["a", 3]}, "words.1=3: must be text, in quotes."),
        ({"pair": [0.5, 2]}, "pair.1=2: must be less than or equal to 1."),
        ({"free": 3}, "free=3: must be a table."),
        ({"inner": 3}, "inner=3: must be a table."),
        ({"maybe": 3}, "maybe=3: must be a table."),
        ({"inner": {"rate": "x"}}, "inner.rate='x': must be a number, without quotes."),
        ({"many": [{"rate": 3}]}, "many.0.rate=3: must be less than 1."),
        ({"rewards": [{"type": "exact", "weight": "x"}]}, "rewards.0.weight='x': must be a number, without quo"),
        ({"files": 3}, "files=3: must be text, in quotes or must be a list."),
        ({"steps": None}, "steps=None: must be a whole number."),
    ],
)
def test_a_wrong_type_or_value_is_said_with_the_rule(tree: dict[str, Any], expected: str) -> None:
    found = problems_of({"steps": 1, **tree})
    assert len(found) == 1, found
    assert found[0].startswith(expected)


def test_a_missing_key_says_what_it_means() -> None:
    assert problems_of({}) == ["steps: is required and missing. How many."]


def test_a_list_that_is_too_short_says_so_only_if_its_items_are_not_the_problem() -> None:
    class Needy(Section):
        rewards: tuple[Annotated[Component, Choice("rewards")], ...] = Field(min_length=1)

    with pytest.raises(ConfigError) as caught:
        config.validate(Needy, {"rewards": []})
    assert caught.value.problems == ("rewards=[]: must have at least 1 item, not 0.",)
    with pytest.raises(ConfigError) as caught:
        config.validate(Needy, {"rewards": [{"type": "exct"}]})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("rewards.0.type='exct'")


def test_contradictions_found_by_a_section_are_reported_as_they_are() -> None:
    assert problems_of({"steps": 13, "on": True}) == ["steps=13: is unlucky.", "on=True: is too much with it."]
