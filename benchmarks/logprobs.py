"""Log-probs from hidden states against the eager path, which makes logits: time and peak memory, forward and backward.

The eager path is torch's: linear, log_softmax, gather, and what entropy and top-k need; it holds no logits longer than
autograd does. Peak memory counts storages beyond the inputs on the CPU (gradients included), and is the allocator's on
a GPU. Wall time is what a user waits; process time (`cpu_time_ratio_*`) is steadier on a machine that others use.
`--quick` takes a smaller vocabulary and width, where products weigh less and logits more.
TRL's function runs in an environment of its own (`make bench-peers`); what is not there gives null.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _record import ROOT, Run
from torch import Tensor
from torch.nn import functional

from ebbtide.device import Device
from ebbtide.memory.live import LiveStorages
from ebbtide.numerics.logprobs import Head, token_stats

TARGETS = {"time_ratio": "<= 1.15", "peak_ratio": "<= 0.1"}


@dataclass(frozen=True)
class Case:
    """What is asked for; each figure's name ends in the suffix."""

    name: str
    suffix: str
    temperature: float = 1.0
    want_entropy: bool = False
    top_k: int = 0
    dtype: torch.dtype = torch.float32


CASES = (
    Case("plain", ""),
    Case("t07", "_t07", temperature=0.7),
    Case("entropy", "_entropy", want_entropy=True),
    Case("topk64", "_topk64", top_k=64),
    Case("bf16", "_bf16", dtype=torch.bfloat16),
)


@dataclass
class Inputs:
    """Random states, head and targets, and the upstream gradients of every result."""

    N: int
    V: int
    D: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        draw = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=self.device)

        self.hidden = normal(self.N, self.D).to(self.dtype).requires_grad_()
        self.weight = normal(self.V, self.D).mul_(2 / self.D**0.5).to(self.dtype).requires_grad_()
        self.targets = torch.randint(self.V, (self.N,), generator=draw, device=self.device)
        self.upstream = normal(self.N)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """What the gradient is taken by."""
        return self.hidden, self.weight


@dataclass
class Samples:
    """Repetitions of one way: seconds of wall and of process, and peak bytes."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def main() -> int:
    """Measure every case."""
    run = Run("logprobs", __doc__, add_flags)
    device = Device.of(run.args.device)
    N, V, D = (2048, 32_768, 256) if run.args.quick else (4096, 151_936, 1024)
    N, repeats = run.args.tokens or N, run.args.repeats or (2 if run.args.quick else 3)
    print(f"N={N} V={V} D={D} on {device.type}, {torch.get_num_threads()} threads, {repeats} repetitions")
    for case in CASES:
        if run.args.case and case.name not in run.args.case:
            continue
        inputs = Inputs(N, V, D, case.dtype, device.torch)
        eager, ours = compare(case, inputs, device, repeats)
        record(run, case, eager, ours)
        if case.name in ("plain", "entropy"):
            record_trl(run, case, inputs, repeats, ours)
        del inputs
    record_small(run, device)
    return run.finish()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Size, repetitions, device, and the peers' interpreter."""
    parser.add_argument("--tokens", type=int, default=0, help="N (default: 4096, quick 2048)")
    parser.add_argument("--repeats", type=int, default=0, help="repetitions (default: 3, quick 2)")
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="measure this case (repeatable; default: all)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu")
    default = ROOT / ".venv-peers" / "bin" / "python"
    parser.add_argument("--peers-python", default=str(default), help="an interpreter that has TRL")


def eager_stats(case: Case, inputs: Inputs) -> list[Tensor]:
    """The same results from logits."""
    logits = functional.linear(inputs.hidden, inputs.weight).float()
    if case.temperature != 1:
        logits = logits / case.temperature
    all_logprobs = logits.log_softmax(-1)
    del logits
    results = [all_logprobs.gather(1, inputs.targets[:, None]).squeeze(1)]
    if case.want_entropy:
        results.append(-(all_logprobs.exp() * all_logprobs).sum(-1))
    if case.top_k:
        results.append(all_logprobs.topk(case.top_k, dim=-1).values.mean(-1))
    return results


def tiled_stats(case: Case, inputs: Inputs) -> list[Tensor]:
    """The same by tiles."""
    stats = token_stats(
        inputs.hidden,
        Head(inputs.weight),
        inputs.targets,
        temperature=case.temperature,
        want_entropy=case.want_entropy,
        top_k=case.top_k,
    )
    topk = None if stats.topk_logprobs is None else stats.topk_logprobs.mean(-1)
    return [result for result in (stats.logprobs, stats.entropy, topk) if result is not None]


def compare(case: Case, inputs: Inputs, device: Device, repeats: int) -> tuple[Samples, Samples]:
    """Both ways in turn, so that what else the machine does meets both; a first pass of each counts memory only."""
    ways: tuple[tuple[Callable[[Case, Inputs], list[Tensor]], Samples], ...] = (
        (eager_stats, Samples()),
        (tiled_stats, Samples()),
    )
    for way, samples in ways:
        samples.peak_bytes = peak_bytes(lambda way=way: step(way, case, inputs), device)  # type: ignore[misc]
    for _ in range(repeats):
        for way, samples in ways:
            device.synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            step(way, case, inputs)
            device.synchronize()
            samples.wall_s.append(time.perf_counter() - wall)
            samples.cpu_s.append(time.process_time() - cpu)
    return ways[0][1], ways[1][1]


def step(way: Callable[[Case, Inputs], list[Tensor]], case: Case, inputs: Inputs) -> None:
    """Forward and backward."""
    results = way(case, inputs)
    torch.autograd.grad(results, inputs.leaves(), [inputs.upstream] * len(results))


def peak_bytes(function: Callable[[], None], device: Device) -> int:
    """The most that it holds beyond what was there."""
    if device.type == "cpu":
        with LiveStorages() as live:
            function()
        return live.peak_bytes
    device.reset_peak()
    before = device.memory().allocated_bytes
    function()
    device.synchronize()
    return device.memory().peak_allocated_bytes - before


def record(run: Run, case: Case, eager: Samples, ours: Samples) -> None:
    """The figures of one case."""
    end = f"_eager{case.suffix}"
    run.figure(f"time_ratio{end}", ratios(ours.wall_s, eager.wall_s), TARGETS["time_ratio"])
    run.figure(f"cpu_time_ratio{end}", ratios(ours.cpu_s, eager.cpu_s))
    run.figure(f"peak_ratio{end}", ours.peak_bytes / eager.peak_bytes, TARGETS["peak_ratio"])
    run.figure(f"time{case.suffix}_s", ours.wall_s)
    run.figure(f"time{end}_s", eager.wall_s)
    run.figure(f"peak{case.suffix}_bytes", ours.peak_bytes)
    run.figure(f"peak{end}_bytes", eager.peak_bytes)


def record_trl(run: Run, case: Case, inputs: Inputs, repeats: int, ours: Samples) -> None:
    """TRL's chunked function on the same shapes: ebbtide's time and peak over its."""
    found = ask_trl(run.args.peers_python, case, inputs, repeats) if inputs.device.type == "cpu" else None
    end = f"_trl{case.suffix}"
    run.figure(f"time_ratio{end}", None if found is None else ratios(ours.wall_s, found["wall_s"]))
    run.figure(f"cpu_time_ratio{end}", None if found is None else ratios(ours.cpu_s, found["cpu_s"]))
    run.figure(f"peak_ratio{end}", None if found is None else ours.peak_bytes / found["peak_bytes"])


def ask_trl(python: str, case: Case, inputs: Inputs, repeats: int) -> dict[str, Any] | None:
    """Its samples, or None where it is not installed."""
    if not Path(python).exists():
        return None
    sizes = {"N": inputs.N, "V": inputs.V, "D": inputs.D, "repeats": repeats, "want_entropy": case.want_entropy}
    command = [python, str(ROOT / "benchmarks" / "peers" / "trl_logprobs.py"), json.dumps(sizes)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 3:
        return None
    if done.returncode:
        raise SystemExit(f"trl_logprobs.py failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def record_small(run: Run, device: Device) -> None:
    """What a call adds to log_softmax and gather where there is next to nothing to compute: microseconds."""
    inputs = Inputs(1500, 15, 64, torch.float32, device.torch)
    added = []
    for _ in range(5):
        samples: dict[str, list[float]] = {"eager": [], "tiled": []}
        for _ in range(100):
            for name, way in (("eager", eager_stats), ("tiled", tiled_stats)):
                start = time.perf_counter()
                step(way, CASES[0], inputs)
                device.synchronize()
                samples[name].append(time.perf_counter() - start)
        quarter = {name: sorted(values)[len(values) // 4] for name, values in samples.items()}
        added.append((quarter["tiled"] - quarter["eager"]) * 1e6)
    run.figure("small_added_us", added)


def ratios(mine: list[float], other: list[float]) -> list[float]:
    """Pair by pair."""
    return [a / b for a, b in zip(mine, other, strict=True)]


if __name__ == "__main__":
    raise SystemExit(main())
