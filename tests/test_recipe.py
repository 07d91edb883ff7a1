from pathlib import Path
from typing import Any

import pytest

from ebbtide import config, plugins
from ebbtide.errors import ConfigError
from ebbtide.recipe import Recipe

RECIPES = sorted(Path("recipes").glob("**/*.toml"))


def tree(**changes: Any) -> dict[str, Any]:
    """The smallest recipe, with some of its tables replaced; None takes one away."""
    whole: dict[str, Any] = {
        "name": "small",
        "steps": 10,
        "model": {"architecture": {"model_type": "qwen3"}, "alphabet": "0123456789", "chat_template": False},
        "data": {"type": "reasoning_gym", "task": "number_sorting"},
        "sampling": {"max_tokens": 8},
        "rewards": [{"type": "reasoning_gym"}],
        "algorithm": {"type": "grpo"},
        "optim": {"lr": 1e-4},
        **changes,
    }
    return {key: value for key, value in whole.items() if value is not None}


def problems_of(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.validate(Recipe, tree(**changes))
    return list(caught.value.problems)


def test_the_smallest_recipe_is_complete() -> None:
    recipe = config.validate(Recipe, tree())
    assert (recipe.engine.type, recipe.rollout.type, recipe.warmup) == ("fsdp", "inprocess", None)


@pytest.mark.parametrize("path", RECIPES, ids=str)
def test_every_recipe_loads_and_its_dump_loads_as_the_same(path: Path, tmp_path: Path) -> None:
    recipe = config.load(Recipe, path)
    dumped = tmp_path / "recipe.toml"
    dumped.write_text(config.dump(recipe), encoding="utf-8")
    assert config.load(Recipe, dumped) == recipe


@pytest.mark.parametrize("name", plugins.names("algorithms"))
def test_a_recipe_with_any_algorithm_comes_back_from_its_dump(name: str, tmp_path: Path) -> None:
    needs_critic = getattr(plugins.load("algorithms", name).Config, "has_critic", False)
    recipe = config.validate(Recipe, tree(algorithm={"type": name}, critic={"lr": 1e-4} if needs_critic else None))
    dumped = tmp_path / "recipe.toml"
    dumped.write_text(config.dump(recipe), encoding="utf-8")
    assert config.load(Recipe, dumped) == recipe


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "a/b"}, "name='a/b': must match pattern"),
        ({"name": ""}, "name='': must match pattern"),
        ({"name": "../up"}, "name='../up': must match pattern"),
        ({"device": "gpu"}, "device='gpu': must be 'auto', 'cpu', 'cuda' or 'npu'."),
        ({"rewards": []}, "rewards=[]: must have at least 1 item, not 0."),
        ({"rewards": None}, "rewards: is required and missing. Each a table with `type`; the training reward is"),
        ({"rewards": [{"type": "exact", "weight": 0}]}, "rewards=1: every reward has weight=0, so that there is noth"),
        ({"batch": {"group_size": 1}}, "batch.group_size=1: algorithm.type='grpo' compares the completions of one"),
        ({"optim": {"lr": 0}}, "optim.lr=0: must be greater than 0."),
        ({"optim": {"lr": 1, "min_lr_ratio": 0.1}}, "optim.min_lr_ratio=0.1: has no effect with schedule='constant'."),
        ({"optim": {"lr": 1, "betas": [0.9, 1.0]}}, "optim.betas.1=1.0: must be less than 1."),
        ({"optim": {"lr": 1, "warmup_steps": 10}}, "optim.warmup_steps=10: the learning rate would never arrive, as t"),
        ({"algorithm": {"type": "ppo"}}, "critic=None: algorithm.type='ppo' needs a critic. Give the recipe [critic]"),
        ({"critic": {"lr": 1e-4}}, "critic=CriticSection(lr=0.0001): algorithm.type='grpo' has no critic. Take [criti"),
        ({"sampling": {"max_tokens": 8, "top_p": 0}}, "sampling.top_p=0: must be greater than 0."),
        ({"sampling": {"max_tokens": 8, "temperature": 0}}, "sampling.temperature=0: must be greater than 0."),
        ({"sampling": {}}, "sampling.max_tokens: is required and missing. New tokens a completion at most."),
        ({"model": {}}, "model.path=None: exactly one of path and architecture must be given. A path loads"),
        ({"model": {"path": "x", "alphabet": "a"}}, "model.alphabet='a': goes with architecture, and is needed there"),
        ({"algorithm": {"type": "grop"}}, "algorithm.type='grop': no such algorithm; known: "),
        ({"data": {"type": "csv"}}, "data.type='csv': no such data source; known: "),
        ({"rollout": {"type": "vlm"}}, "rollout.type='vlm': no such rollout backend; known: "),
        ({"engine": {"type": "fdsp"}}, "engine.type='fdsp': no such engine; known: "),
        ({"observe": {"sinks": [{"type": "wand"}]}}, "observe.sinks.0.type='wand': no such logger; known: "),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(changes: dict[str, Any], expected: str) -> None:
    found = problems_of(**changes)
    assert found[0].startswith(expected)
    assert len(found) == 1


def test_problems_of_several_tables_come_together() -> None:
    found = problems_of(model={"architecture": {"hidden_size": 8}}, sampling={"max_tokens": 0}, stepz=3)
    assert sorted(text.partition("=")[0] for text in found) == [
        "model.alphabet",
        "model.architecture",
        "sampling.max_tokens",
        "stepz",
    ]


def test_contradictions_between_tables_come_together() -> None:
    found = problems_of(batch={"group_size": 1}, optim={"lr": 1.0, "warmup_steps": 99})
    assert [text.partition("=")[0] for text in found] == ["batch.group_size", "optim.warmup_steps"]


def _assert_described(section: type[config.Section], above: str = "") -> None:
    for name, info in section.model_fields.items():
        found = config.explain(Recipe, f"{above}{name}")
        assert len(found.text) > 5, f"{above}{name} has no sentence under it"
        assert found.text.endswith("."), found
        assert found.type
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, config.Section) and nested is not config.Component:
            _assert_described(nested, f"{above}{name}.")


def test_every_key_of_a_recipe_says_what_it_means() -> None:
    _assert_described(Recipe)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("algorithm", "algorithms"),
        ("data", "data.sources"),
        ("engine", "engines"),
        ("rewards", "rewards"),
        ("rollout", "rollout"),
        ("observe.sinks", "observe.sinks"),
    ],
)
def test_every_key_of_every_plugin_says_what_it_means(key: str, kind: str) -> None:
    assert plugins.names(kind)
    for name in plugins.names(kind):
        _assert_described(plugins.load(kind, name).Config, f"{key}.{name}.")
