import tomllib
from pathlib import Path
from typing import Any

import pytest

from ebbtide import config
from ebbtide.errors import ConfigError
from tests.config.tree import Outer


def test_all_problems_come_at_once_those_of_the_overrides_too(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('steps = "many"\nlrr = 1\n[inner]\nrat = 3\n')
    with pytest.raises(ConfigError) as caught:
        config.load(Outer, recipe, ["nonsense", "many.0.rate=1", "steps.x=1", "on=yes", "maybe.raet=0.1"])
    assert caught.value.problems == (
        "override='nonsense': must be key.path=value. For example optim.lr=1e-6.",
        "steps.x=1: steps is a value, not a table.",
        "inner.rat=3: no such key. Did you mean 'inner.rate'?",
        "maybe.raet=0.1: no such key. Did you mean 'maybe.rate'?",
        "lrr=1: no such key. Did you mean 'lr'?",
        "steps='many': must be a whole number, without quotes.",
        "on='yes': must be true or false, without quotes.",
        "many={'0': {'rate': 1}}: must be a list.",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim.lr=1e-6", (["optim", "lr"], 1e-6)),
        ("a = 3", (["a"], 3)),
        ("a=true", (["a"], True)),
        ('a="7"', (["a"], "7")),
        ("a=vllm", (["a"], "vllm")),
        ("a=path/to.py:score", (["a"], "path/to.py:score")),
        ("a=x=y", (["a"], "x=y")),
        ("a=", (["a"], "")),
        ("a=2024-01-01", (["a"], "2024-01-01")),
        ("a=1\nb=2", (["a"], "1\nb=2")),
        ("a=[1, 2]", (["a"], [1, 2])),
        ("a={type='x'}", (["a"], {"type": "x"})),
        ("a.b . c=1", (["a", "b", "c"], 1)),
    ],
)
def test_an_override_is_read_as_toml_where_it_is_toml(text: str, expected: tuple[list[str], Any]) -> None:
    assert config.parse_override(text) == expected


@pytest.mark.parametrize("text", ["", "a", "=3", "a.=3", ".a=3", "a..b=1", "--resume"])
def test_an_override_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be key\.path=value"):
        config.parse_override(text)


def test_overrides_apply_in_order_and_reach_into_lists(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('steps = 1\n[[rewards]]\ntype = "exact"\n[[rewards]]\ntype = "math"\n')
    checked = config.load(Outer, recipe, ["steps=2", "rewards.1.weight=3.0", "steps=4", "inner.norm=none"])
    assert checked.steps == 4
    assert [getattr(reward, "weight", None) for reward in checked.rewards] == [1.0, 3.0]
    assert checked.inner.norm is None


def test_a_recipe_that_is_not_there_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(ConfigError, match=r"no such file. Did you mean '.*quickstart.toml'\?"):
        config.load(Outer, tmp_path / "quikstart.toml")
    with pytest.raises(ConfigError, match=r"no such file. Recipes lie in recipes/"):
        config.load(Outer, tmp_path / "absent" / "r.toml")


@pytest.mark.parametrize("content", [b"steps = ", b"steps = 1\nsteps = 2", b"\xff\xfe", b"[a\n"])
def test_a_file_that_is_not_toml_says_where(tmp_path: Path, content: bytes) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_bytes(content)
    with pytest.raises(ConfigError, match="is not TOML"):
        config.load(Outer, recipe)


ROUND_TRIPS: list[dict[str, Any]] = [
    {"steps": 1},
    {"steps": 1, "lr": 1, "pair": [0, 1]},
    {"steps": 1, "inner": {"norm": None}},
    {"steps": 1, "inner": {"norm": "none", "label": 'line\nbreak, "quotes" and \\ and \u00e9'}},
    {"steps": 1, "maybe": {"rate": 0.1}, "many": [{}, {"norm": None}]},
    {"steps": 1, "rewards": [{"type": "exact", "weight": 0.1 + 0.2}, {"type": "math", "name": "m"}]},
    {"steps": 1, "free": {"a": [1, {"b": 2.5}], "c": {"type": "str"}}, "files": ["x", "y"]},
    {"steps": 1, "files": "x"},
]


@pytest.mark.parametrize("tree", ROUND_TRIPS)
def test_what_is_dumped_loads_as_the_same(tmp_path: Path, tree: dict[str, Any]) -> None:
    section = config.validate(Outer, tree)
    path = tmp_path / "r.toml"
    path.write_text(config.dump(section), encoding="utf-8")
    assert config.load(Outer, path) == section
    assert config.dump(config.load(Outer, path)) == config.dump(section)


def test_the_dump_is_the_whole_tree() -> None:
    tree = tomllib.loads(config.dump(config.validate(Outer, {"steps": 1, "inner": {"norm": None}})))
    assert tree["lr"] == 1e-3
    assert tree["inner"] == {"rate": 0.5, "norm": "none"}
    assert tree["reward"]["type"] == "exact"


def test_differences_are_the_leaves_that_differ() -> None:
    old = config.validate(Outer, {"steps": 1, "rewards": [{"type": "exact"}]})
    new = config.validate(Outer, {"steps": 2, "rewards": [{"type": "exact", "weight": 2.0}], "maybe": {}})
    found = config.differences(old, new)
    assert found["steps"] == (1, 2)
    assert found["rewards.0.weight"] == (1.0, 2.0)
    assert found["maybe.rate"] == (None, 0.5)
    assert "lr" not in found
    assert config.differences(old, old) == {}
