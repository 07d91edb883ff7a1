"""Short runs for the loop's tests: a recipe on a tiny model, and the parts of one, with everything closed after."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from ebbtide import config
from ebbtide.loop.parts import Data, Parts, build, build_data
from ebbtide.memory.ledger import Ledger
from ebbtide.recipe import Recipe
from ebbtide.rewards.scoring import Rewards
from ebbtide.weightsync.push import push

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def recipe(**changes: Any) -> Recipe:
    """The quickstart with a smaller model, no warm-up, few steps and small batches; dotted keys change it."""
    small: dict[str, Any] = {
        "steps": 3,
        "eval.prompts": 8,
        "eval.every_steps": 0,
        "batch.prompts": 4,
        "batch.group_size": 4,
        "model.architecture.num_hidden_layers": 2,
        "model.architecture.hidden_size": 32,
        "data.prompt": f"{ROOT}/recipes/quickstart_task.py:prompt",
        "data.demonstration": f"{ROOT}/recipes/quickstart_task.py:demonstrate",
        "rewards.0.answer": f"{ROOT}/recipes/quickstart_task.py:answer",
        "warmup": "none",
        "observe.progress": False,
    }
    if "rewards" in changes:
        del small["rewards.0.answer"]
    overrides = [f"{key}={_toml(value)}" for key, value in (small | changes).items()]
    return config.load(Recipe, ROOT / "recipes/quickstart.toml", overrides)


def with_parts(chosen: Recipe, work: Callable[[Parts], Coroutine[Any, Any, T]]) -> T:
    """Build the recipe's parts, push version 0, run `work`, close."""

    async def whole(rewards: Rewards) -> T:
        parts = build(chosen, data, chosen.model, rewards, Ledger(data.device))
        try:
            await push(parts.engine.named_weights(), parts.transport, parts.rollout, 0)
            return await work(parts)
        finally:
            await parts.close()

    data: Data = build_data(chosen)
    with Rewards(chosen.rewards) as rewards:
        return asyncio.run(whole(rewards))


def distinct(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """A reward that a random model earns some of: distinct characters, over 6."""
    assert len(prompts) == len(completions)
    assert columns
    return [len(set(completion)) / 6 for completion in completions]


def picky(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """A reward that raises on some prompts."""
    assert columns
    if any("9" in prompt for prompt in prompts):
        raise ValueError("no nines")
    return [len(set(completion)) / 6 for completion in completions]


def function_reward(name: str, **fields: Any) -> list[dict[str, Any]]:
    """The `rewards` of a recipe: one function of this file."""
    return [{"type": "function", "path": f"{__file__}:{name}", **fields}]


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
