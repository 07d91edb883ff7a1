import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ebbtide.observe.jsonl import MetricsFile
from ebbtide.observe.record import Run, read_run
from ebbtide.observe.report import render, write_report
from ebbtide.observe.run_folder import RunFolder

VOID = {"meta", "line", "path", "circle", "polyline", "br", "i"}
RECIPE = """
name = "sorting & more"
steps = 40
[model.architecture]
model_type = "qwen3"
[data]
type = "reasoning_gym"
task = "number_sorting"
[algorithm]
type = "grpo"
[batch]
prompts = 32
group_size = 8
"""
ENVIRONMENT = {
    "started": "2026-01-02T03:04:05+00:00",
    "python": "3.11.7",
    "versions": {"ebbtide": "0.1.0", "torch": "2.13.0"},
    "machine": {"num_cores": 2, "memory_bytes": 2**34, "cpu": "a CPU", "name": "host", "system": "Linux"},
}


def step_row(step: int) -> dict[str, float]:
    share = step / 40
    return {
        "step": step,
        "reward/mean": share,
        "reward/accuracy": share,
        "reward/exact_mean": share,
        "reward/length_mean": 1 - share,
        "policy/entropy_nats": 2 - share,
        "policy/ratio_mean": 1.0 + share / 100,
        "policy/ratio_min": 0.5,
        "policy/ratio_max": 2.0,
        "policy/kl_nats": share / 10,
        "loss/total": -share,
        "completion/mean_tokens": 5 + share,
        "completion/min_tokens": 1,
        "completion/max_tokens": 9,
        "throughput/generated_tokens_per_s": 1000.0,
        "throughput/tokens_per_s": 2000.0 + step,
        "time/step_s": 0.06,
        "time/generate_s": 0.02,
        "time/update_s": 0.03,
        "time/update.forward_s": 0.01,
        "time/update_clean_up_s": 0.001,
        "memory/generate_peak_rss_bytes": 2.0**28 + step,
        "memory/update_peak_rss_bytes": 2.0**29 + step,
    }


def eval_row(step: int, accuracy: float) -> dict[str, float]:
    return {
        "step": step,
        "eval/accuracy": accuracy,
        "eval/greedy_accuracy": accuracy + 0.05,
        "eval/reward_mean": accuracy,
        "eval/num_prompts": 256.0,
        "time/eval_s": 1.5,
    }


def finished(**changes: Any) -> Run:
    rows = [eval_row(0, 0.125), *(step_row(step) for step in range(1, 40)), step_row(40) | eval_row(40, 0.875)]
    values: dict[str, Any] = {"recipe_text": RECIPE, "environment": ENVIRONMENT, "rows": rows, "samples": []}
    return Run(**(values | changes))


class Checker(HTMLParser):
    """Opens and closes in order, and loads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {key}={value}" for key, value in attrs if key in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


def read(page: str) -> str:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loads == []
    assert "url(" not in page
    assert "@import" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}
    return " ".join(" ".join(checker.text).split())


def test_a_finished_run_is_told_on_one_page_that_loads_nothing() -> None:
    text = read(render(finished()))
    assert "40 steps, complete" in text
    assert "sorting & more" in text
    for title in ("Reward", "Accuracy", "Entropy", "Ratio", "Divergence", "Loss", "Completion length", "Speed",
                  "Seconds by phase", "Memory by phase", "Where the time went", "Resolved recipe"):  # fmt: skip
        assert title in text, title
    assert "12.5 &rarr; 87.5 %" in render(finished())
    assert "Before and after, on 256 held-out prompts" in text
    assert "12.5 % (9 to 17)" in text
    assert "87.5 % (83 to 91)" in text
    assert "17.5 %" in text
    assert "92.5 %" in text
    assert "qwen3 from random weights" in text
    assert "reasoning_gym number_sorting" in text


def test_inner_phases_and_clean_ups_are_not_counted_twice() -> None:
    run = finished()
    assert run.phases() == ["eval", "update", "generate"]
    text = read(render(run))
    assert "update 1.2 s 24.0 %" in text  # 40 x 0.03 of 40 x 0.05 + 2 x 1.5
    assert "generate 800 ms 16.0 %" in text
    assert "eval 3.0 s 60.0 %" in text
    assert "update.forward" not in text


def test_phases_of_a_few_steps_stay_out_of_the_stack() -> None:
    page = render(finished())
    (figure,) = re.findall(r'<figure class="chart"><figcaption><h3>Seconds by phase.*?</figure>', page)
    assert re.findall(r"</i>(\w+)</li>", figure) == ["update", "generate"]


def test_what_never_moves_is_a_sentence_and_no_chart() -> None:
    rows = [step_row(step) | {"optim/lr": 1e-4} for step in range(1, 41)]
    text = read(render(finished(rows=rows)))
    assert "The same throughout: " in text
    assert "learning rate (lr 0.0001)" in text
    assert "Learning rate" not in text


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [eval_row(0, 0.1)],
        [step_row(1)],
        [step_row(1), {"step": 2, "reward/mean": math.nan}],
        [{"step": 1}],
        [step_row(step) for step in range(1, 4)],
    ],
)
def test_a_run_that_broke_off_anywhere_has_a_page(rows: list[dict[str, float]]) -> None:
    text = read(render(finished(rows=rows)))
    assert "of 40 steps" in text
    assert "nan" not in text


def test_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    assert "There is no step to draw yet." in read(write_report(RunFolder(tmp_path)).read_text())


def test_a_long_run_makes_a_small_page() -> None:
    rows = [step_row(step) for step in range(1, 20_001)]
    assert len(render(finished(rows=rows))) < 1_500_000


def test_answers_to_one_prompt_stand_side_by_side_and_stay_text() -> None:
    samples = [
        {"step": 0, "prompt": "3 1 2", "completion": "<b>3</b>", "reward": 0.0},
        {"step": 0, "prompt": [{"role": "user", "content": "sort <i>$name"}], "completion": "x", "reward": 0.5},
        {"step": 40, "prompt": "3 1 2", "completion": "1 2 3", "reward": 1.0},
        {"step": 40, "prompt": [{"role": "user", "content": "sort <i>$name"}], "completion": "y", "reward": 1.0},
    ]
    page = render(finished(samples=samples))
    assert "<b>3</b>" not in page
    assert "<i>$name" not in page
    assert (
        "Some answers prompt step 0 reward step 40 reward 3 1 2 <b>3</b> 0 1 2 3 1 user: sort <i>$name x 0.5 y 1"
        in read(page)
    )


def test_the_folder_is_read_as_it_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.recipe.write_text(RECIPE)
    folder.environment.write_text(json.dumps(ENVIRONMENT))
    with MetricsFile(folder.metrics) as file:
        file.write(0, {"eval/accuracy": 0.5})
        file.write(1, {"reward/mean": 0.5})
        file.write(1, {"eval/accuracy": 0.75})
    with folder.metrics.open("a") as broken_off:
        broken_off.write('{"step": 2, "rew')
    folder.samples.write_text('{"step": 0, "prompt": "p", "completion": "c", "reward": 1.0}\n{"step": 0, "pro')
    run = read_run(folder)
    assert run.rows == [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward/mean": 0.5, "eval/accuracy": 0.75}]
    assert [row["completion"] for row in run.samples] == ["c"]
    first = write_report(folder).read_text()
    assert write_report(folder).read_text() == first
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        "environment.json", "metrics.jsonl", "recipe.toml", "report.html", "samples.jsonl",
    ]  # fmt: skip
