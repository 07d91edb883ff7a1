"""A pre-trained language model on its recipe, from start to end: what it reaches on held-out prompts, and how fast.

Needs models/SmolLM2-135M-Instruct (`python scripts/smollm2_from_pypi.py`). `--run FOLDER` reads a finished run instead
of making one; `--curve FILE.svg` draws its rewards and evaluations.
"""

import argparse
import tempfile
from pathlib import Path

from _record import Run
from _runs import Rows, ends, read, train

RECIPE = "smollm2_135m_cpu"


def main() -> int:
    run = Run("smollm2", __doc__, _flags)
    if run.args.run is not None:
        rows = read(run.args.run)
    else:
        overrides = ["steps=2", "optim.warmup_steps=0", "eval.prompts=32"] if run.args.quick else []
        with tempfile.TemporaryDirectory() as folder:
            rows = train(RECIPE, Path(folder) / "run", "observe.progress=false", *overrides)
    found = ends(rows)
    run.figure("accuracy_before", found.sampled_before)
    run.figure("accuracy_after", found.sampled_after)
    run.figure("greedy_accuracy_before", found.greedy_before)
    run.figure("greedy_accuracy_after", found.greedy_after)
    gained = 100 * (found.sampled_after - found.sampled_before)
    run.figure("accuracy_gain_points", gained, None if run.args.quick else ">= 25")
    run.figure("phases_s", sum(value for row in rows for key, value in row.items() if _is_phase(key)), "<= 1200")
    run.figure("step_s", [row["time/step_s"] for row in rows if "time/step_s" in row])
    if run.args.curve is not None:
        draw(rows, run.args.curve)
    return run.finish()


def _is_phase(key: str) -> bool:
    return key.startswith("time/") and key.endswith("_s") and "." not in key and key != "time/step_s"


def draw(rows: Rows, path: Path) -> None:
    """Training reward of each step, and held-out accuracy where it was evaluated."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    steps = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    sampled = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    greedy = [(row["step"], row["eval/greedy_accuracy"]) for row in rows if "eval/greedy_accuracy" in row]
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(*zip(*steps, strict=True), color="#9aa7b5", linewidth=1, label="training reward of the step")
    smooth = [(steps[i][0], sum(value for _, value in steps[i - 9 : i + 1]) / 10) for i in range(9, len(steps))]
    if smooth:
        axes.plot(*zip(*smooth, strict=True), color="#1f6fb2", linewidth=2, label="mean of ten steps")
    axes.plot(*zip(*sampled, strict=True), "o", color="#c2410c", label="held-out accuracy, as it samples")
    axes.plot(*zip(*greedy, strict=True), "s", color="#15803d", label="held-out accuracy, greedy")
    axes.set(xlabel="step", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, help="a finished run to read")
    parser.add_argument("--curve", type=Path, help="where to draw the curve, as SVG")


if __name__ == "__main__":
    raise SystemExit(main())
