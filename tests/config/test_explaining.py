from typing import Any

import pytest

from ebbtide import config
from ebbtide.errors import ConfigError
from tests.config.tree import Outer


@pytest.mark.parametrize(
    ("key", "kind", "default", "text"),
    [
        ("steps", "whole number, >= 1", None, "How many."),
        ("lr", "number, > 0", 1e-3, ""),
        ("on", "true or false", False, ""),
        ("mode", "one of 'a', 'b'", "a", ""),
        ("pair", "list of number and number, <= 1", (0.0, 1.0), ""),
        ("words", "list of text", (), ""),
        ("free", "table", {}, ""),
        ("files", "text or list of text", (), ""),
        ("inner", "table", {"rate": 0.5, "norm": 1.0, "label": None}, "Settings of the inner part."),
        ("inner.rate", "number, >= 0, < 1", 0.5, "How fast."),
        ("inner.norm", "number, or none", 1.0, "Bound; None leaves it away."),
        ("maybe", "table, or none", None, "Settings of the inner part."),
        ("maybe.rate", "number, >= 0, < 1", 0.5, "How fast."),
        ("many.rate", "number, >= 0, < 1", 0.5, "How fast."),
        ("rewards", "list of table with a type", (), ""),
        ("reward.weight", "number", 1.0, "Factor in the training reward, which is the weighted sum; 0 only reports"),
        ("reward.math.weight", "number", 1.0, "Factor in the training reward, which is the weighted sum; 0 only rep"),
    ],
)
def test_a_key_is_explained_by_type_default_and_meaning(key: str, kind: str, default: Any, text: str) -> None:
    found = config.explain(Outer, key)
    assert (found.key, found.type, found.default, found.value) == (key, kind, default, None)
    assert found.text.startswith(text)
    assert found.is_required == (key == "steps")


def test_a_key_of_a_recipe_is_explained_with_its_value() -> None:
    section = config.validate(
        Outer, {"steps": 7, "rewards": [{"type": "math", "weight": 2.0}], "inner": {"rate": 0.25}}
    )
    assert config.explain(section, "steps").value == 7
    assert config.explain(section, "rewards.0.weight").value == 2.0
    assert config.explain(section, "inner").value == {"rate": 0.25, "norm": 1.0, "label": None}
    assert config.explain(section, "rewards.0").value["weight"] == 2.0
    assert "weight" in config.explain(section, "rewards.0").known
    assert config.explain(section, "rewards.exact.weight").value is None
    assert config.explain(Outer, "rewards").known == ("exact", "function", "math", "reasoning_gym")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("stepz", "key='stepz': there is no stepz; known here: steps, lr, .*. Did you mean 'steps'?"),
        ("inner.raet", "there is no inner.raet; known here: rate, norm, label. Did you mean 'inner.rate'?"),
        ("rewards.weight", "there is no rewards.weight; known here: exact, function, math, reasoning_gym."),
        ("rewards.exact.wieght", "Did you mean 'rewards.exact.weight'?"),
        ("steps.x", "there is no steps.x; known here: nothing."),
        ("", "there is no ; known here: steps"),
    ],
)
def test_an_unknown_key_to_explain_names_the_nearest(key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.explain(Outer, key)
    for part in expected.split(".*"):
        assert part in str(caught.value)
