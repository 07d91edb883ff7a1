"""The one file for reading and the system give the same losses."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ebbtide.loop.parts import Parts
from ebbtide.loop.sync import train_step
from ebbtide.models.build import build_model, load_tokenizer
from ebbtide.recipe import Recipe
from tests.loop.running import distinct, function_reward, recipe, with_parts

FILE = Path(__file__).parents[2] / "examples" / "grpo_one_file.py"


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_one_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_is_short_enough_to_read() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gives_the_losses_of_the_synchronous_loop(one_file: ModuleType, temperature: float) -> None:
    changes = {"steps": 6, "optim.lr": 2e-3, "optim.schedule": "constant", "sampling.temperature": temperature}
    chosen = recipe(rewards=function_reward("distinct"), **changes)
    losses, rewards, prompts = _run_loop(chosen)
    assert len(set(rewards)) > 1, "a reward that never varies would show nothing"

    model = build_model(chosen.model, dtype=torch.float32, seed=chosen.seed)
    model.set_attn_implementation("sdpa")
    tokenizer = load_tokenizer(chosen.model)
    settings = one_file.Settings(group_size=4, max_tokens=6, temperature=temperature, eos=tokenizer.eos_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)

    def reward_of(prompt: list[int], tokens: list[int]) -> float:
        return distinct([str(prompt)], [tokenizer.decode(tokens, skip_special_tokens=True)], row=[None])[0]

    for step, wanted in enumerate(losses):
        loss, reward = one_file.train_step(model, optimizer, prompts[step], reward_of, step * 16, settings)
        assert reward == pytest.approx(rewards[step])
        assert loss == pytest.approx(wanted, abs=2e-6)


def test_learns(one_file: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_file, "warm_up", lambda model, rng: None)
    one_file.main(steps=2, num_prompts=2)
    assert "step   1  loss" in capsys.readouterr().out


def test_sorted_answers_alone_earn_a_reward(one_file: ModuleType) -> None:
    prompt = one_file.make_prompt(random.Random(0))
    assert one_file.is_sorted(prompt, [*sorted(prompt[:5]), one_file.EOS]) == 1
    assert one_file.is_sorted(prompt, sorted(prompt[:5])) == 0


def _run_loop(chosen: Recipe) -> tuple[list[float], list[float], list[list[list[int]]]]:
    async def work(parts: Parts) -> tuple[list[float], list[float], list[list[list[int]]]]:
        losses, rewards, prompts = [], [], []
        for step in range(chosen.steps):
            report = await train_step(parts, step)
            losses.append(report.metrics["loss/total"])
            rewards.append(report.metrics["reward/mean"])
            prompts.append([group.prompt.token_ids.tolist() for group in report.groups])
        return losses, rewards, prompts

    return with_parts(chosen, work)
