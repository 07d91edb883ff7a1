"""One GRPO step of the quickstart and of SmolLM2-135M: seconds by phase, tokens a second, peak memory, beside TRL.

Each side is a process of its own on the same checkpoint, prompts, scorer, batch, group and token limit; after a
warm-up the sides take turns, one step each. The learning rate is so small that all steps are alike, and completions of
SmolLM2 never end before their limit, so that both sides do the same work.

    --peer trl     TRL's GRPOTrainer, from the environment that `make bench-peers` makes

Both sides get the number of threads that TRL runs fastest with, and TRL the settings that it runs fastest with here:
no gradient checkpointing, the whole batch in one forward, weights in the model's dtype without autocast.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _record import ROOT, Run

PEERS = ROOT / "benchmarks" / "peers"
TRL_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
ALIKE = ["steps=100000", "optim.lr=1e-7", "optim.schedule='constant'", "optim.warmup_steps=0"]


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        prefix: of the figures' names.
        recipe: file in recipes/.
        overrides: of the recipe, beside those that make all steps alike.
        threads: of each side.
        warm_steps, steps: not counted, and counted.
        ratio, memory: bounds on samples a second and peak memory, as shares of TRL's.
    """

    prefix: str
    recipe: str
    overrides: tuple[str, ...]
    threads: int
    warm_steps: int
    steps: int
    ratio: str
    memory: str


@dataclass
class Side:
    """One process that makes a step whenever it is asked."""

    process: subprocess.Popen[str]
    ready: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def start(python: Path, script: str, settings: Path) -> "Side":
        """Start it and wait until it is ready."""
        log = settings.with_name(f"{script}.log").open("w")
        command = [str(python), str(PEERS / script), str(settings)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        side = Side(process)
        try:
            side.ready = side.read()
        except RuntimeError:
            side.stop()
            raise
        return side

    def step(self) -> None:
        """One step, timed from here."""
        assert self.process.stdin is not None
        begin = time.perf_counter()
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.read()
        self.seconds.append(time.perf_counter() - begin)
        self.replies.append(self.read())

    def read(self) -> dict[str, Any]:
        """The next reply."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def stop(self) -> None:
        """End the process, and no other."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> int:
    """Measure every case that can be measured here."""
    run = Run("step", __doc__, _flags)
    quick = run.args.quick
    cases = [Case("", "quickstart.toml", (), 1, 3, 8 if quick else 40, ">= 3", "<= 1")]
    if not quick:
        overrides = ("batch.group_size=4", "sampling.max_tokens=64", "model.dtype='bfloat16'")
        cases.append(
            Case("smollm2_", "smollm2_135m_cpu.toml", overrides, 2, 1, run.args.smollm2_steps, ">= 1.3", "<= 0.5")
        )
    for case in cases:
        can_run = case.recipe.startswith("quickstart") or SMOLLM2.is_dir()
        ours, peer = measure(case, with_peer=run.args.peer == "trl") if can_run else (None, None)
        record(run, case, ours, peer)
    return run.finish()


def measure(case: Case, *, with_peer: bool) -> tuple[Side, Side | None]:
    """Run the sides in turn."""
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(case, Path(folder))
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        sides = []
        try:
            sides.append(Side.start(Path(sys.executable), "ebbtide_grpo.py", path))
            if with_peer and TRL_PYTHON.exists():
                path.write_text(json.dumps(settings | {"model": sides[0].ready["model"]}), encoding="utf-8")
                sides.append(Side.start(TRL_PYTHON, "trl_grpo.py", path))
            for _ in range(case.warm_steps + case.steps):
                for side in sides:
                    side.step()
        except RuntimeError:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"== {log.name}\n{log.read_text(encoding='utf-8')[-3000:]}", file=sys.stderr)
            raise
        finally:
            for side in sides:
                side.stop()
    for side in sides:
        del side.seconds[: case.warm_steps], side.replies[: case.warm_steps]
    return sides[0], sides[1] if len(sides) > 1 else None


def _settings(case: Case, folder: Path) -> dict[str, Any]:
    """What both sides are told."""
    from ebbtide.config import load
    from ebbtide.recipe import Recipe

    overrides = [*ALIKE, *case.overrides]
    recipe = load(Recipe, ROOT / "recipes" / case.recipe, overrides)
    data, reward = recipe.data.model_dump(), recipe.rewards[0].model_dump()
    return {
        "recipe": str(ROOT / "recipes" / case.recipe),
        "overrides": overrides,
        "folder": str(folder),
        "rows": str(folder / "rows.jsonl"),
        "num_rows": 4096,
        "threads": case.threads,
        "task": data["task"],
        "params": data["params"],
        "answer": reward["answer"],
        "dtype": recipe.model.dtype,
        "num_prompts": recipe.batch.prompts,
        "group_size": recipe.batch.group_size,
        "max_tokens": recipe.sampling.max_tokens,
        "temperature": recipe.sampling.temperature,
        "lr": recipe.optim.lr,
        "microbatch": 0,
        "gradient_checkpointing": False,
    }


def record(run: Run, case: Case, ours: Side | None, peer: Side | None) -> None:
    """Figures of one case; None where a side is not there."""
    prefix = case.prefix
    run.figure(f"{prefix}step_s", ours and ours.seconds)
    for name in sorted(ours.replies[0]["phases"]) if ours else []:
        run.figure(f"{prefix}{name}_s", [reply["phases"][name] for reply in ours.replies])  # type: ignore[union-attr]
    run.figure(f"{prefix}generated_tokens_per_s", ours and _rate(ours, "completion_tokens", "generate"))
    run.figure(f"{prefix}trained_tokens_per_s", ours and _rate(ours, "completion_tokens", "update"))
    run.figure(f"{prefix}samples_per_s", ours and _samples_per_s(ours))
    run.figure(f"{prefix}peak_rss_bytes", ours and [reply["peak_rss_bytes"] for reply in ours.replies])
    run.figure(f"{prefix}trl_samples_per_s", peer and _samples_per_s(peer))
    run.figure(f"{prefix}trl_peak_rss_bytes", peer and [reply["peak_rss_bytes"] for reply in peer.replies])
    speed = memory = None
    if ours and peer:
        pairs = list(zip(_samples_per_s(ours), _samples_per_s(peer), strict=True))
        speed = [mine / theirs for mine, theirs in pairs]
        memory = max(r["peak_rss_bytes"] for r in ours.replies) / max(r["peak_rss_bytes"] for r in peer.replies)
    run.figure(f"{prefix}samples_per_s_ratio_trl", speed, case.ratio)
    run.figure(f"{prefix}peak_rss_ratio_trl", memory, case.memory)


def _samples_per_s(side: Side) -> list[float]:
    return [reply["samples"] / seconds for reply, seconds in zip(side.replies, side.seconds, strict=True)]


def _rate(side: Side, count: str, phase: str) -> list[float]:
    return [reply[count] / reply["phases"][phase] for reply in side.replies]


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", choices=["trl"], help="the framework to compare with")
    parser.add_argument("--smollm2-steps", type=int, default=3, help="counted steps of the larger model")


if __name__ == "__main__":
    raise SystemExit(main())
