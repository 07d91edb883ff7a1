"""The quickstart from start to end: what it reaches, and how long it takes.

Each seed is a run of its own, `ebbtide train recipes/quickstart.toml seed=N`, in a process of its own. Accuracy is the
recipe's own evaluation on held-out prompts, after the warm-up and after the last step, as the policy samples
(temperature 1) and greedy.
"""

import argparse
import tempfile
import time
from pathlib import Path

from _record import Run
from _runs import ends, train


def main() -> int:
    run = Run("quickstart", __doc__, _flags)
    seeds = run.args.seeds[:1] if run.args.quick else run.args.seeds
    found, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            begin = time.monotonic()
            found.append(ends(train("quickstart", Path(folder) / str(seed), f"seed={seed}", "observe.progress=false")))
            seconds.append(time.monotonic() - begin)
            print(f"seed {seed}: {found[-1]}, {seconds[-1]:.0f} s", flush=True)
    run.figure("accuracy_before_max", max(max(item.sampled_before, item.greedy_before) for item in found), "<= 0.2")
    run.figure("accuracy_after_min", min(item.sampled_after for item in found), ">= 0.9")
    run.figure("accuracy_after", [item.sampled_after for item in found])
    run.figure("greedy_accuracy_after", [item.greedy_after for item in found])
    run.figure("total_s", seconds, "<= 240")
    return run.finish()


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="runs (default: %(default)s)")


if __name__ == "__main__":
    raise SystemExit(main())
