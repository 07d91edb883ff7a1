"""Whole runs: what they leave, that they repeat, and how they end."""

import json
import math
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbtide import config
from ebbtide.engines.fsdp import FSDPEngine
from ebbtide.errors import DataError, NonFiniteError, RewardError, RunFolderError
from ebbtide.loop.run import train
from ebbtide.memory.ledger import Ledger
from ebbtide.observe.jsonl import read_metrics
from ebbtide.recipe import Recipe
from tests.loop.running import function_reward, recipe

NOISE = ("time/", "memory/", "throughput/")


def comparable(folder: Path) -> list[dict[str, float]]:
    """The metrics without what a clock or the kernel says."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(NOISE)} for row in rows]


def test_leaves_a_whole_folder(tmp_path: Path) -> None:
    chosen = recipe(**{"eval.every_steps": 2})
    result = train(chosen, tmp_path / "run")
    folder = result.folder
    assert config.load(Recipe, folder / "recipe.toml") == chosen
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2, 3, 3]
    assert json.loads((folder / "environment.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    prompt = torch.tensor([tokenizer("57061<")["input_ids"]])
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[0] == 1


def test_the_same_recipe_gives_the_same_numbers(tmp_path: Path) -> None:
    chosen = recipe(rewards=function_reward("distinct"), warmup={"steps": 2, "examples": 4})
    for name in ("first", "second"):
        train(chosen, tmp_path / name)
    rows = comparable(tmp_path / "first")
    assert rows == comparable(tmp_path / "second")
    assert any(row.get("optim/grad_norm", 0.0) > 0 for row in rows)
    other = recipe(rewards=function_reward("distinct"), seed=1, warmup={"steps": 2, "examples": 4})
    train(other, tmp_path / "other")
    assert comparable(tmp_path / "other") != rows


def test_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 4, "optim.schedule": "cosine", "checkpoint.every_steps": 2}
    whole = recipe(rewards=function_reward("distinct"), **changes)
    train(whole, tmp_path / "whole")
    train(whole, tmp_path / "halved")
    for path in (tmp_path / "halved/checkpoints").glob("step-4"):
        path.rename(tmp_path / "moved")
    train(whole, tmp_path / "halved", existing="resume")
    trained = [row for row in comparable(tmp_path / "whole") if "loss/total" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert [row for row in comparable(tmp_path / "halved") if "loss/total" in row] == trained


def test_a_folder_is_not_taken_by_accident(tmp_path: Path) -> None:
    train(recipe(steps=1), tmp_path / "run")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="overwrite"):
        train(recipe(steps=1), tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    train(recipe(steps=1), tmp_path / "run", existing="overwrite")


def test_a_gradient_that_is_not_finite_skips_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison_gradients(monkeypatch, steps=[2])
    train(recipe(steps=3, rewards=function_reward("distinct")), tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss/total" in row]
    assert [row["optim/num_skipped"] for row in rows] == [0, 1, 1]
    assert math.isnan(rows[1]["optim/grad_norm"])
    assert math.isfinite(rows[2]["optim/grad_norm"])


def test_too_many_such_steps_end_the_run_and_keep_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison_gradients(monkeypatch, steps=[2, 3])
    chosen = recipe(steps=9, rewards=function_reward("distinct"), **{"optim.max_skipped_steps": 2})
    with pytest.raises(NonFiniteError, match=r"optim\.max_skipped_steps=2.*up to step 3"):
        train(chosen, tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-3/model")
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
    assert len(comparable(tmp_path / "run")) == 4


def test_a_failing_reward_stops_the_run_or_costs_its_groups(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"picky.*row"):
        train(recipe(rewards=function_reward("picky")), tmp_path / "stop")
    skipping = recipe(rewards=function_reward("picky", on_error="skip_group"), **{"batch.prompts": 8})
    train(skipping, tmp_path / "skip")
    rows = [row for row in read_metrics(tmp_path / "skip/metrics.jsonl") if "group/num_kept" in row]
    assert any(row["reward/num_failed"] > 0 for row in rows)
    assert all(row["group/num_kept"] + row["reward/num_failed"] == 8 for row in rows)


def test_a_prompt_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"max_prompt_tokens|tokens"):
        train(recipe(**{"batch.max_prompt_tokens": 3}), tmp_path / "run")


@pytest.mark.parametrize("instant", ["warmup", "generate", "update"])
def test_ctrl_c_ends_soon_and_leaves_a_readable_folder(tmp_path: Path, instant: str) -> None:
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    run = context.Process(target=_endless_run, args=(tmp_path / "run", instant, tell))
    run.start()
    try:
        assert told.poll(60), "the run never came to the instant"
        assert run.pid is not None
        os.kill(run.pid, signal.SIGINT)
        run.join(30)  # a quiet machine takes well under the promised 5 s
        assert run.exitcode == INTERRUPTED
    finally:
        run.kill()
        run.join()
    assert config.load(Recipe, tmp_path / "run/recipe.toml").steps == 100_000
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert instant == "warmup" or rows[-1]["step"] >= 1


INTERRUPTED = 130


def _endless_run(folder: Path, instant: str, tell: Connection) -> None:
    """Runs until it is interrupted; tells when the phase begins, the third time if it comes every step."""
    enter, count = Ledger._enter, 0

    def telling(self: Ledger, name: str) -> Any:
        nonlocal count
        count += name == instant
        if count == (1 if instant == "warmup" else 3):
            tell.send(instant)
        return enter(self, name)

    Ledger._enter = telling  # type: ignore[method-assign]
    warmup = {"steps": 20_000 if instant == "warmup" else 2, "examples": 4}
    try:
        train(recipe(steps=100_000, warmup=warmup), folder)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _poison_gradients(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """The gradients of these optimizer steps, counted from 1, become NaN."""
    step_of = FSDPEngine.optim_step
    count = 0

    def poisoned(self: FSDPEngine) -> Any:
        nonlocal count
        count += 1
        if count in steps:
            for parameter in self._policy.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(float("nan"))
        return step_of(self)

    monkeypatch.setattr(FSDPEngine, "optim_step", poisoned)
