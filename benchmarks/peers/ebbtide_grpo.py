"""ebbtide's loop, one step at a time, for `benchmarks/step.py`: the same protocol as the peers' scripts.

It first writes what the peers are to start from: a checkpoint, after the recipe's warm-up where it has one, and rows.
Rows have the prompt and the task's item, so that all sides get the same prompts and score with the same function.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from ebbtide import env

env.prepare()

import psutil  # noqa: E402 the environment comes before torch
import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from ebbtide.config import load  # noqa: E402
from ebbtide.loop.parts import Data, build, build_data, build_engine  # noqa: E402
from ebbtide.loop.sync import train_step  # noqa: E402
from ebbtide.loop.warmup import warm_up  # noqa: E402
from ebbtide.memory.ledger import Ledger  # noqa: E402
from ebbtide.models.export import save_checkpoint  # noqa: E402
from ebbtide.recipe import ModelSection, Recipe  # noqa: E402
from ebbtide.rewards.scoring import Rewards  # noqa: E402
from ebbtide.weightsync.push import push  # noqa: E402


def main(settings_path: str) -> None:
    """Prepare, then serve steps until standard input ends."""
    settings = json.loads(Path(settings_path).read_text(encoding="utf-8"))
    recipe, start = load(Recipe, Path(settings["recipe"]), settings["overrides"]), Path(settings["folder"]) / "start"
    if recipe.model.path is not None:
        never_ending(Path(recipe.model.path), start)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(start)})})
    torch.set_num_threads(settings["threads"])
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # the pipe is for replies
    data = build_data(recipe)
    with Rewards(recipe.rewards) as rewards:
        write_rows(data, Path(settings["rows"]), settings["num_rows"])
        model = start_model(recipe, data, start)
        print(json.dumps({"ready": True, "model": model.path}), file=replies, flush=True)
        asyncio.run(serve(recipe, data, model, rewards, replies))


def start_model(recipe: Recipe, data: Data, path: Path) -> ModelSection:
    """The weights that both sides start from, as a checkpoint."""
    if recipe.model.path is not None:
        return recipe.model
    assert recipe.warmup is not None, recipe.name
    optim = recipe.optim.model_copy(update={"lr": recipe.warmup.lr, "schedule": "linear"})
    supervised = recipe.model_copy(update={"optim": optim})
    engine = build_engine(supervised, data.device, recipe.model, recipe.warmup.steps)
    warm_up(recipe.warmup, engine, data.prompts, recipe.seed, data.encode, data.eos_ids[0], lambda *_: None)
    save_checkpoint(path, engine.named_weights(), data.model_config, data.tokenizer)
    engine.close()
    return recipe.model.model_copy(update={"path": str(path), "architecture": None, "alphabet": None})


def never_ending(checkpoint: Path, path: Path) -> None:
    """The checkpoint with an end token that no text has, so that every completion takes all of its tokens."""
    path.mkdir(parents=True)
    for file in checkpoint.iterdir():
        (path / file.name).symlink_to(file.resolve())
    token_id, token = list(AutoTokenizer.from_pretrained(checkpoint).added_tokens_decoder.items())[-1]
    ends = {"config.json": token_id, "generation_config.json": token_id, "tokenizer_config.json": token.content}
    for name, end in ends.items():
        settings = json.loads((checkpoint / name).read_text(encoding="utf-8"))
        (path / name).unlink()
        settings["eos_token" if name.startswith("tokenizer") else "eos_token_id"] = end
        (path / name).write_text(json.dumps(settings), encoding="utf-8")


def write_rows(data: Data, path: Path, num_rows: int) -> None:
    """The first training rows, one a line."""
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_rows):
            row = dict(data.prompts.source[index])
            file.write(json.dumps({"prompt": row.pop("prompt"), "item": row}) + "\n")


async def serve(recipe: Recipe, data: Data, model: ModelSection, rewards: Rewards, replies: Any) -> None:
    """One training step a line."""
    ledger = Ledger(data.device)
    parts = build(recipe, data, model, rewards, ledger)
    await push(parts.engine.named_weights(), parts.transport, parts.rollout, 0)
    ledger.step_metrics()
    version = 0
    while sys.stdin.readline().strip() == "step":
        report = await train_step(parts, version)
        print(json.dumps({"done": True}), file=replies, flush=True)
        version += 1
        metrics = report.metrics | ledger.step_metrics()
        peak = max(value for name, value in metrics.items() if name.endswith("_peak_rss_bytes"))
        reply = {
            "samples": recipe.batch.prompts * recipe.batch.group_size,
            "completion_tokens": sum(len(item.token_ids) for group in report.groups for item in group.completions),
            "peak_rss_bytes": peak + _helpers_bytes(),
            "phases": {
                name[len("time/") : -len("_s")]: value
                for name, value in metrics.items()
                if name.startswith("time/") and "." not in name and "clean_up" not in name
            },
        }
        print(json.dumps(reply), file=replies, flush=True)
    await parts.close()


def _helpers_bytes() -> int:
    """What the rewards' processes hold for themselves; they share the rest with this one."""
    return sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))


if __name__ == "__main__":
    main(sys.argv[1])
