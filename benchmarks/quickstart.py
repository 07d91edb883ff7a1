"""The quickstart from start to end: what it reaches, and how long it takes.

Each seed is a run of its own, `ebbtide train recipes/quickstart.toml seed=N`, in a process of its own. Accuracy is the
recipe's own evaluation on held-out prompts, after the warm-up and after the last step, as the policy samples
(temperature 1) and greedy.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _record import ROOT, Run


def main() -> int:
    run = Run("quickstart", __doc__, _flags)
    seeds = run.args.seeds[:1] if run.args.quick else run.args.seeds
    before, after, after_greedy, seconds = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            begin = time.monotonic()
            rows = train(seed, Path(folder))
            seconds.append(time.monotonic() - begin)
            evaluated = [row for row in rows if "eval/greedy_accuracy" in row]
            start, end = evaluated[0], evaluated[-1]
            before += [start["eval/accuracy"], start["eval/greedy_accuracy"]]
            after.append(end["eval/accuracy"])
            after_greedy.append(end["eval/greedy_accuracy"])
            print(
                f"seed {seed}: sampled {start['eval/accuracy']:.3f} -> {end['eval/accuracy']:.3f}, "
                f"greedy {start['eval/greedy_accuracy']:.3f} -> {end['eval/greedy_accuracy']:.3f}, {seconds[-1]:.0f} s",
                flush=True,
            )
    run.figure("accuracy_before_max", max(before), "<= 0.2")
    run.figure("accuracy_after_min", min(after), ">= 0.9")
    run.figure("accuracy_after", after)
    run.figure("greedy_accuracy_after", after_greedy)
    run.figure("total_s", seconds, "<= 240")
    return run.finish()


def train(seed: int, folder: Path) -> list[dict[str, float]]:
    """Run one seed; its metrics."""
    name = f"quickstart-{seed}"
    command = [sys.executable, "-m", "ebbtide.cli.main", "train", "recipes/quickstart.toml"]
    command += [f"seed={seed}", f"name={name}", "observe.progress=false"]
    env_command = ["env", f"EBBTIDE_RUNS={folder}", *command]
    done = subprocess.run(env_command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"seed {seed} failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="runs (default: %(default)s)")


if __name__ == "__main__":
    raise SystemExit(main())
