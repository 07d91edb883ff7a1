import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from ebbtide import config
from ebbtide.config import Choice, Component, Section
from ebbtide.errors import ConfigError, problem

EXACT: Any = {"type": "exact"}


class Inner(Section):
    """Settings of the inner part."""

    rate: float = Field(0.5, ge=0, lt=1)
    """How fast."""
    norm: float | None = 1.0
    """Bound; None leaves it away."""
    label: str | None = None


class Outer(Section):
    """A tree with every kind of field."""

    steps: int = Field(ge=1)
    """How many."""
    lr: float = Field(1e-3, gt=0)
    on: bool = False
    mode: Literal["a", "b"] = "a"
    pair: tuple[float, Annotated[float, Field(le=1)]] = (0.0, 1.0)
    words: tuple[str, ...] = ()
    free: dict[str, Any] = Field(default_factory=dict)
    files: str | tuple[str, ...] = ()
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()
    rewards: tuple[Annotated[Component, Choice("rewards")], ...] = ()
    reward: Annotated[Component, Choice("rewards")] = Field(EXACT)

    @model_validator(mode="after")
    def _odd_together(self) -> "Outer":
        if self.steps == 13 and self.on:
            raise ConfigError([problem("steps", 13, "is unlucky"), problem("on", True, "is too much with it")])
        return self


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


def test_a_section_cannot_be_changed() -> None:
    section = config.validate(Outer, {"steps": 1})
    with pytest.raises(ValueError, match="frozen"):
        section.steps = 2  # type: ignore[misc]


def test_differences_are_the_leaves_that_differ() -> None:
    old = config.validate(Outer, {"steps": 1, "rewards": [{"type": "exact"}]})
    new = config.validate(Outer, {"steps": 2, "rewards": [{"type": "exact", "weight": 2.0}], "maybe": {}})
    found = config.differences(old, new)
    assert found["steps"] == (1, 2)
    assert found["rewards.0.weight"] == (1.0, 2.0)
    assert found["maybe.rate"] == (None, 0.5)
    assert "lr" not in found
    assert config.differences(old, old) == {}


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


def test_reading_the_configuration_machinery_loads_no_heavy_package() -> None:
    script = """
import sys
import ebbtide, ebbtide.config, ebbtide.recipe, ebbtide.plugins, ebbtide.errors, ebbtide.units, ebbtide.env
heavy = {"torch", "transformers", "numpy", "vllm", "ray", "wandb", "mlflow", "tensorboard", "datasets", "reasoning_gym"}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
