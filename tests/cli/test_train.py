import json
from pathlib import Path

import pytest

from ebbtide import config
from ebbtide.cli.main import main
from ebbtide.observe.jsonl import read_metrics
from ebbtide.recipe import Recipe
from tests.cli.conftest import QUICKSTART, SMALL, train_arguments


def test_a_run_leaves_everything_that_a_person_needs(run_folder: Path) -> None:
    names = {path.name for path in run_folder.iterdir()}
    assert {"metrics.jsonl", "recipe.toml", "environment.json", "samples.jsonl", "report.html", "final"} <= names
    assert config.load(Recipe, run_folder / "recipe.toml") == config.load(Recipe, QUICKSTART, SMALL)
    assert {row["step"] for row in read_metrics(run_folder / "metrics.jsonl")} == {0, 1, 2}
    assert "2 steps, complete" in (run_folder / "report.html").read_text()


def test_a_folder_that_exists_is_refused_and_may_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*train_arguments(tmp_path / "run"), "steps=1"]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "holds an earlier run. Go on with it by --resume, replace it by --overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["folder"] == str(tmp_path / "run")
    assert answer["num_prompts"] == 16
    assert 0 <= answer["accuracy_after"] <= 1
    assert answer["seconds"] > 0


def test_a_run_that_is_resumed_goes_on_and_writes_no_step_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(train_arguments(folder)) == 0
    assert main([*train_arguments(folder), "steps=3", "--resume"]) == 0
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3]


def test_resume_and_overwrite_contradict_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*train_arguments(tmp_path / "run"), "--resume", "--overwrite"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_recipe_with_mistakes_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*train_arguments(tmp_path / "run"), "optim.lrr=1"]) == 2
    assert "error: optim.lrr=1: no such key. Did you mean 'optim.lr'?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_runs_lie_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_RUNS", str(tmp_path))
    assert main(["train", str(QUICKSTART), *SMALL, "steps=1", "name=mine"]) == 0
    assert (tmp_path / "mine" / "final" / "config.json").is_file()
