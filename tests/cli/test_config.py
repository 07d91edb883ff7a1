import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli.main import main

RECIPE = """
name = "small"
steps = 10
[model]
alphabet = "0123456789"
architecture = { model_type = "qwen3" }
[data]
type = "reasoning_gym"
task = "number_sorting"
[sampling]
max_tokens = 8
[[rewards]]
type = "exact"
[algorithm]
type = "grpo"
[optim]
lr = 1e-4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(["config", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_is_the_whole_recipe_as_toml_and_as_json(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "show", recipe, "steps=7", "rewards.0.weight=2.0")
    tree = tomllib.loads(text)
    assert code == 0
    assert (tree["steps"], tree["rewards"][0]["weight"], tree["optim"]["betas"]) == (7, 2.0, [0.9, 0.999])
    _, text, _ = run(capsys, "show", "--json", recipe, "steps=7")
    assert json.loads(text)["steps"] == 7
    assert json.loads(text)["warmup"] is None


def test_check_says_that_a_recipe_can_be_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", recipe) == (0, f"{recipe} can be run\n", "")
    code, text, _ = run(capsys, "check", recipe, "--json")
    assert (code, json.loads(text)) == (0, {"recipe": str(recipe), "ok": True, "problems": []})


def test_check_says_everything_that_is_wrong(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", recipe, "optim.lrr=1", "rewards.0.wieght=1", "steps=many"]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sorted(err.splitlines()) == [
        "optim.lrr=1: no such key. Did you mean 'optim.lr'?",
        "rewards.0.wieght=1: no such key. Did you mean 'rewards.0.weight'?",
        "steps='many': must be a whole number, without quotes.",
    ]
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (2, "")
    assert json.loads(out)["ok"] is False
    assert len(json.loads(out)["problems"]) == 3


def test_explain_says_type_default_and_meaning(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "explain", "optim.schedule")[1].splitlines() == [
        "optim.schedule: How the learning rate falls after its warm-up, over the steps of the run.",
        "  type     one of 'constant', 'linear', 'cosine'",
        '  default  "constant"',
    ]
    assert run(capsys, "explain", "optim.lr", recipe)[1].splitlines()[1:] == [
        "  type     number, > 0",
        "  default  none: it is required",
        "  here     0.0001",
    ]
    text = run(capsys, "explain", "rewards")[1]
    assert "  types    exact, function, math, reasoning_gym" in text
    text = run(capsys, "explain", "optim")[1]
    assert "  keys     lr, schedule, warmup_steps" in text
    assert "default" not in text


def test_explain_as_json(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads(run(capsys, "explain", "optim.lr", recipe, "--json")[1])
    assert row == {
        "key": "optim.lr",
        "type": "number, > 0",
        "required": True,
        "default": None,
        "value": 1e-4,
        "text": "Peak learning rate.",
        "known": [],
    }
    rows = json.loads(run(capsys, "explain", "--json")[1])
    assert "steps" in [row["key"] for row in rows]
    assert "value" not in rows[0]


def test_without_a_key_all_of_the_top_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "explain")[1].splitlines()
    assert any(line.startswith("steps ") and line.endswith("Policy updates.") for line in lines)


def test_an_unknown_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain", "optim.lrr")
    assert code == 2
    assert err.startswith("error: key='optim.lrr': there is no optim.lrr; known here: lr, ")
    assert err.endswith("Did you mean 'optim.lr'?\n")


def test_diff_shows_what_differs_and_its_code_says_so(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.toml"
    other.write_text(RECIPE.replace("steps = 10", "steps = 20") + "max_grad_norm = 0.5\n[warmup]\nsteps = 3\n")
    assert run(capsys, "diff", recipe, recipe) == (0, "", "")
    code, text, _ = run(capsys, "diff", recipe, other)
    assert code == 1
    assert text.splitlines()[:2] == ["steps: 10 -> 20", "optim.max_grad_norm: 1.0 -> 0.5"]
    assert "warmup.steps: none -> 3" in text.splitlines()
    code, text, _ = run(capsys, "diff", recipe, other, "--json")
    assert json.loads(text)["steps"] == {"old": 10, "new": 20}


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "show", tmp_path / "absent.toml")
    assert (code, err.startswith("error: recipe=")) == (2, True)
