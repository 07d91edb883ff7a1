"""TRL's chunked log-probs on shapes given as JSON, for `benchmarks/logprobs.py`; runs in an environment of its own.

Prints one line of JSON: seconds of wall and process a repetition, and peak bytes. Exits with 3 where TRL, or the
function, is not there.
"""

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from ebbtide.memory.live import LiveStorages


def main(sizes: dict[str, int]) -> None:
    """Measure, with the chunk that TRL's trainers pass."""
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError:
        sys.exit(3)
    N, V, D = sizes["N"], sizes["V"], sizes["D"]
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=draw).requires_grad_()
    weight = torch.randn(V, D, generator=draw).mul_(2 / D**0.5).requires_grad_()
    targets = torch.randint(V, (N,), generator=draw)
    upstream = torch.randn(N, generator=draw)
    outputs = ("entropy",) if sizes["want_entropy"] else ()

    def step() -> None:
        logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, 8192, None, 1.0, outputs
        )
        results = [result for result in (logprobs, entropy) if result is not None]
        torch.autograd.grad(results, (hidden, weight), [upstream] * len(results))

    with LiveStorages() as live:
        step()
    found: dict[str, list[float]] = {"wall_s": [], "cpu_s": []}
    for _ in range(sizes["repeats"]):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        found["wall_s"].append(time.perf_counter() - wall)
        found["cpu_s"].append(time.process_time() - cpu)
    print(json.dumps(found | {"peak_bytes": live.peak_bytes}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
