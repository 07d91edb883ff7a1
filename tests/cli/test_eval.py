import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli.main import main
from ebbtide.observe.interval import wilson_interval
from ebbtide.observe.jsonl import read_metrics
from tests.cli.conftest import ROOT


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_run_is_as_accurate_as_it_said_when_it_ended(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = [row for row in read_metrics(run_folder / "metrics.jsonl") if "eval/accuracy" in row][-1]
    found = evaluate(capsys, run_folder)
    assert (found["accuracy"], found["num_prompts"]) == (last["eval/accuracy"], 16)
    assert found["reward_mean"] == last["eval/reward_mean"]
    assert (found["low"], found["high"]) == wilson_interval(found["num_correct"], 16)
    assert found["checkpoint"] == str(run_folder / "final")
    assert evaluate(capsys, run_folder, "--greedy")["accuracy"] == last["eval/greedy_accuracy"]


def test_settings_change_what_is_asked(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(capsys, run_folder, "--step", 1, "--prompts", 8, "eval.temperature=0.5")
    assert (found["num_prompts"], found["temperature"]) == (8, 0.5)
    assert found["checkpoint"] == str(run_folder / "checkpoints" / "step-1" / "model")


def test_a_checkpoint_alone_is_asked_a_task(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = f"{ROOT}/recipes/quickstart_task.py"
    settings = ["model.chat_template=false", f"data.prompt={task}:prompt", f"rewards.0.answer={task}:answer"]
    short = "data.params={min_numbers=5, max_numbers=5, min_decimals=0, max_decimals=0, min_value=0, max_value=9}"
    found = evaluate(capsys, run_folder / "final", "--task", "number_sorting", "--prompts", 4, *settings, short,
                     "sampling.max_tokens=6")  # fmt: skip
    assert found["num_prompts"] == 4
    found = evaluate(capsys, run_folder / "final", "--recipe", run_folder / "recipe.toml", "--prompts", 4)
    assert found["num_prompts"] == 4


def test_a_person_reads_accuracy_with_its_interval(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run_folder), "--greedy"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("accuracy 0.")
    assert "95 % interval 0." in text
    assert " of 16 prompts right, greedy; mean reward " in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["{run}/final"],
            "says nothing about data and rewards. Add --task NAME or --recipe FILE, or name a run's folder",
        ),
        (["{run}/final", "--step", "1", "--task", "x"], "only a run has steps, and the checkpoint is none"),
        (["{run}", "--step", "7"], "there are no weights of this step; steps with weights: 1, 2."),
        (["{run}", "optim.lrr=1"], "optim.lrr=1: no such key. Did you mean 'optim.lr'?"),
        (["{run}", "--prompts", "0"], "eval.prompts=0: must be greater than or equal to 1"),
        (["{run}", "--recipe", "absent.toml"], "recipe='absent.toml': no such file"),
    ],
)
def test_what_cannot_be_evaluated_says_why(
    arguments: list[str], expected: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(item.format(run=run_folder) for item in arguments)]) == 2
    assert expected in capsys.readouterr().err
