"""What each algorithm's recipe reaches on the quickstart's task after the same budget: same warm start, same steps.

The warm-up runs once a seed, and every algorithm starts from its weights; accuracy is on held-out prompts, sampled at
temperature 1 and greedy. Every recipe of recipes/algorithms/ takes part; its learning rate is the recipe's own.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from _record import ROOT, Run

from ebbtide import config
from ebbtide.loop.run import train
from ebbtide.recipe import Recipe


@dataclass(frozen=True)
class Reached:
    """One run of one recipe.

    Attributes:
        start: sampled accuracy of the warm start.
        sampled, greedy: accuracy at the end.
    """

    start: float
    sampled: float
    greedy: float


def main() -> int:
    """Run every recipe over the seeds."""
    run = Run("algorithms", __doc__, add_flags)
    steps = run.args.steps or (10 if run.args.quick else 200)
    seeds = range(1 if run.args.quick else run.args.seeds)
    recipes = sorted((ROOT / "recipes" / "algorithms").glob("*.toml"))
    os.chdir(ROOT)  # recipes name their files from here
    reached: dict[str, list[Reached]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            start = warm_start(recipes[0], seed, Path(folder) / f"start-{seed}")
            for path in recipes:
                found = measure(path, start, seed, steps, Path(folder) / f"{path.stem}-{seed}")
                reached.setdefault(path.stem, []).append(found)
                line = f"{found.start:.3f} -> {found.sampled:.3f}, greedy {found.greedy:.3f}"
                print(f"{path.stem:<22} seed {seed}: {line}", flush=True)
    for name, results in reached.items():
        run.figure(f"accuracy_{name}", [result.sampled for result in results])
        run.figure(f"greedy_accuracy_{name}", [result.greedy for result in results])
    run.figure("accuracy_start", [result.start for results in reached.values() for result in results])
    return run.finish()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Budget and repetitions."""
    parser.add_argument("--steps", type=int, default=None, help="policy updates of each run (default: 200, quick: 10)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe, with seeds of their own")


def warm_start(path: Path, seed: int, folder: Path) -> Path:
    """The supervised start that all recipes share, as a checkpoint."""
    recipe = config.load(Recipe, path, [f"seed={seed}", "steps=1", "eval.prompts=1", "observe.progress=false"])
    return train(recipe, folder).folder / "warmup"


def measure(path: Path, start: Path, seed: int, steps: int, folder: Path) -> Reached:
    """One run from the warm start."""
    recipe = config.load(
        Recipe, path, [f"seed={seed}", f"steps={steps}", "eval.every_steps=0", "observe.progress=false"]
    )
    model = recipe.model.model_copy(update={"path": str(start), "architecture": None, "alphabet": None})
    result = train(recipe.model_copy(update={"model": model, "warmup": None}), folder)
    return Reached(
        start=result.before[0].accuracy,
        sampled=result.after[0].accuracy,
        greedy=result.after[1].accuracy,
    )


if __name__ == "__main__":
    sys.exit(main())
