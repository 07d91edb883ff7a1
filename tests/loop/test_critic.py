"""PPO with its critic: values begin at 0, learn the returns, and are saved and restored with the run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.errors import ConfigError
from ebbtide.loop.parts import Parts
from ebbtide.loop.run import train
from ebbtide.loop.step import add_logprobs, generate, make_batch, update_critic
from ebbtide.observe.jsonl import read_metrics
from ebbtide.rewards.scoring import score
from ebbtide.types import TrainBatch
from tests.loop.running import function_reward, recipe, with_parts

PPO: dict[str, Any] = {"algorithm": {"type": "ppo"}, "critic": {"lr": 3e-3}, "optim.schedule": "constant"}


def test_values_begin_at_zero_and_learn_the_returns() -> None:
    async def work(parts: Parts) -> tuple[TrainBatch, list[float], torch.Tensor]:
        prompts = parts.data.prompts.next(parts.sampler)
        groups = await generate(parts.rollout, prompts, 4, parts.sampling, parts.counter)
        batch = make_batch(score(groups, parts.rewards, parts.data.decode).groups, parts.algorithm)
        assert parts.critic is not None
        first, _ = add_logprobs(batch, parts.algorithm, parts.engine, None, parts.critic)
        policy_before = [weight.clone() for _, weight in parts.engine.named_weights()]
        losses = [update_critic(parts.critic, first, parts.algorithm)["critic/loss"] for _ in range(60)]  # type: ignore[arg-type]
        policy_after = [weight for _, weight in parts.engine.named_weights()]
        assert all(torch.equal(a, b) for a, b in zip(policy_before, policy_after, strict=True))
        return first, losses, parts.critic.logprobs(batch)

    chosen = recipe(rewards=function_reward("distinct"), **PPO, **{"algorithm.value_clip": "none"})
    batch, losses, values_T = with_parts(chosen, work)
    assert batch.values is not None
    assert batch.returns is not None
    assert torch.equal(batch.values, torch.zeros_like(batch.values))
    assert losses[-1] < losses[0] / 5
    mask = batch.loss_mask
    assert torch.corrcoef(torch.stack([values_T[mask], batch.returns[mask]]))[0, 1] > 0.5
    assert torch.equal(values_T[~mask], torch.zeros_like(values_T[~mask]))


def test_resumes_with_its_critic(tmp_path: Path) -> None:
    chosen = recipe(rewards=function_reward("distinct"), **PPO, **{"steps": 4, "checkpoint.every_steps": 2})
    train(chosen, tmp_path / "whole")
    train(chosen, tmp_path / "halved")
    (tmp_path / "halved/checkpoints/step-4").rename(tmp_path / "moved")
    train(chosen, tmp_path / "halved", existing="resume")
    keys = ("step", "loss/total", "critic/loss", "critic/value_mean", "critic/grad_norm")
    runs = [
        [{key: row[key] for key in keys} for row in read_metrics(tmp_path / name / "metrics.jsonl") if keys[1] in row]
        for name in ("whole", "halved")
    ]
    assert len(runs[0]) == 4
    assert runs[0] == runs[1]


def test_a_critic_is_needed_where_it_is_used_and_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"critic=None: algorithm\.type='ppo' needs a critic"):
        recipe(algorithm={"type": "ppo"})
    with pytest.raises(ConfigError, match=r"algorithm\.type='grpo' has no critic"):
        recipe(critic={"lr": 1e-3})
