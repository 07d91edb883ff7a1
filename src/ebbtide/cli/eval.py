"""`ebbtide eval`: how often a checkpoint is right."""

import asyncio
import json
import tomllib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

__all__ = ["Eval"]

_ANSWER_TOKENS = 256  # where no recipe says how long an answer may be


class Eval:
    """Answers held-out prompts with a checkpoint."""

    name = "eval"
    help = "accuracy of a checkpoint on held-out prompts"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `Command.add_arguments`."""
        parser.add_argument("checkpoint", help="a run's folder, or a folder or hub id of a Hugging Face checkpoint")
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of a recipe, as in `train`")
        parser.add_argument("--task", help="a task of reasoning-gym with its own scorer, where no recipe gives data")
        parser.add_argument("--recipe", type=Path, help="takes data, rewards and sampling from it; a run has its own")
        parser.add_argument("--step", type=int, help="of a run: the checkpoint after this step in place of the last")
        parser.add_argument("--prompts", type=int, help="how many held-out prompts")
        parser.add_argument("--greedy", action="store_true", help="take the likeliest token instead of sampling")
        parser.add_argument("--json", action="store_true", help="one JSON object on standard output")

    def run(self, arguments: Namespace) -> int:
        """See `Command.run`."""
        from ebbtide import config
        from ebbtide.observe.console import set_up_logging
        from ebbtide.recipe import Recipe

        recipe = config.resolve(Recipe, _tree(arguments), [*_settings(arguments), *arguments.overrides])
        set_up_logging(to_stderr=arguments.json)
        from ebbtide.loop.examine import examine

        found = asyncio.run(examine(recipe))
        low, high = found.interval
        if arguments.json:
            row = {"checkpoint": recipe.model.path, "accuracy": found.accuracy, "low": low, "high": high}
            rest = {
                "num_prompts": found.num_prompts,
                "num_correct": found.num_correct,
                "reward_mean": found.reward_mean,
            }
            print(json.dumps({**row, **rest, "temperature": recipe.eval.temperature}))
        else:
            how = "greedy" if recipe.eval.temperature == 0 else f"at temperature {recipe.eval.temperature:g}"
            print(f"accuracy {found.accuracy:.3f}, 95 % interval {low:.3f} to {high:.3f}")
            print(
                f"{found.num_correct} of {found.num_prompts} prompts right, {how}; mean reward {found.reward_mean:.3f}"
            )
        return 0


def _tree(arguments: Namespace) -> dict[str, Any]:
    """A recipe's tree whose model is the checkpoint."""
    from ebbtide.errors import ConfigError, problem
    from ebbtide.observe.run_folder import RunFolder, is_run_folder

    path, source = arguments.checkpoint, arguments.recipe
    if is_run_folder(Path(path)):
        folder = RunFolder.open(Path(path))
        path, source = str(folder.checkpoint(arguments.step)), source or folder.recipe
    elif arguments.step is not None:
        rule = "only a run has steps, and the checkpoint is none"
        raise ConfigError(problem("--step", arguments.step, rule, "Name the run's folder"))
    if source is not None:
        tree = _read(source)
    elif arguments.task is not None:
        tree = {"sampling": {"max_tokens": _ANSWER_TOKENS}, "algorithm": {"type": "grpo"}, "optim": {"lr": 1e-6}}
    else:
        rule = "says nothing about data and rewards"
        raise ConfigError(problem("checkpoint", path, rule, "Add --task NAME or --recipe FILE, or name a run's folder"))
    if arguments.task is not None:
        tree["data"] = {"type": "reasoning_gym", "task": arguments.task}
        tree["rewards"] = [{"type": "reasoning_gym"}]
    model = {key: value for key, value in tree.get("model", {}).items() if key not in ("architecture", "alphabet")}
    tree.pop("warmup", None)
    return {"name": "eval", "steps": 1, **tree, "model": {**model, "path": path}}


def _read(path: Path) -> dict[str, Any]:
    from ebbtide import config
    from ebbtide.recipe import Recipe

    return tomllib.loads(config.dump(config.load(Recipe, path)))  # its problems are told as those of a recipe


def _settings(arguments: Namespace) -> list[str]:
    settings = [] if arguments.prompts is None else [f"eval.prompts={arguments.prompts}"]
    return [*settings, "eval.temperature=0"] if arguments.greedy else settings
