"""`ebbtide train`: run a recipe."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Literal

from ebbtide import env

__all__ = ["Train"]


class Train:
    """Runs a recipe in a folder of its own."""

    name = "train"
    help = "run a recipe"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `Command.add_arguments`."""
        parser.add_argument("recipe", type=Path, help="a TOML file")
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the file's")
        existing = parser.add_mutually_exclusive_group()
        existing.add_argument("--resume", action="store_true", help="go on with the run in the folder")
        existing.add_argument("--overwrite", action="store_true", help="replace the run in the folder")
        parser.add_argument("--folder", type=Path, help="the run's folder; runs/<name> if left away")
        parser.add_argument("--json", action="store_true", help="one JSON object on standard output at the end")

    def run(self, arguments: Namespace) -> int:
        """See `Command.run`."""
        from ebbtide import config
        from ebbtide.observe.console import set_up_logging
        from ebbtide.recipe import Recipe

        recipe = config.load(Recipe, arguments.recipe, arguments.overrides)
        set_up_logging(to_stderr=arguments.json)
        folder = arguments.folder or env.runs_dir() / recipe.name
        from ebbtide.loop.run import train  # after the recipe is known to be good: it loads everything

        existing: Literal["refuse", "overwrite", "resume"]
        existing = "resume" if arguments.resume else "overwrite" if arguments.overwrite else "refuse"
        result = train(recipe, folder, existing=existing)
        if arguments.json:
            print(json.dumps(_as_json(result)))
        return 0


def _as_json(result: Any) -> dict[str, Any]:
    sampled_before, greedy_before = result.before
    sampled_after, greedy_after = result.after
    return {
        "folder": str(result.folder),
        "seconds": result.seconds,
        "accuracy_before": sampled_before.accuracy,
        "accuracy_after": sampled_after.accuracy,
        "greedy_accuracy_before": greedy_before.accuracy,
        "greedy_accuracy_after": greedy_after.accuracy,
        "num_prompts": sampled_after.num_prompts,
    }
