"""What a batch costs in memory against the number of its microbatches, sealed and with the fault put back.

A rank's live bytes are counted by storage, so that the figures are exact. The loss asks for an entropy that it does not
learn from, which is what keeps the most where outputs stay attached. `fault` replaces the seal by nothing.

Figures:
    growth_bytes_per_microbatch_sealed  of a rank's peak beyond the stored outputs themselves, the worst engine and rank
    growth_bytes_per_microbatch_fault   the same with attached outputs; at 0 the benchmark would measure nothing
    held_growth_bytes_sealed            of what is alive once the batch is done, beyond the outputs
    peak_bytes_<engine>_r<rank>_n<num>  live bytes at one time, sealed
"""

import argparse
from dataclasses import dataclass

import torch
from _engines import LikelihoodWithEntropy, make_engine, packed, ranks, setting
from _record import Run

from ebbtide.engines import base
from ebbtide.memory.live import LiveStorages

WORLDS = {"fsdp": 1, "pipeline": 2}
OPTIONS: dict[str, dict[str, int]] = {"fsdp": {}, "pipeline": {"pp": 2}}
VOCAB, HIDDEN, LAYERS, LENGTH = 512, 128, 4, 64
NUMS = (2, 8, 32, 64)


@dataclass(frozen=True)
class Cost:
    """Of one batch on one rank, in bytes.

    Attributes:
        peak: live storages at one time, at most, the weights and the optimizer's state aside.
        held: alive when the batch is done, outputs aside.
        outputs: of the outputs.
    """

    peak: int
    held: int
    outputs: int


def main() -> int:
    run = Run("microbatch_memory", __doc__, _add_flags)
    nums = NUMS[:3] if run.args.quick else NUMS
    sealed = {name: measure(name, nums, is_sealed=True) for name in run.args.engine}
    fault = {name: measure(name, nums, is_sealed=False) for name in run.args.engine}
    for name in run.args.engine:
        _show(name, nums, sealed[name], fault[name])
        for rank, costs in enumerate(sealed[name]):
            for num, cost in zip(nums, costs, strict=True):
                run.figure(f"peak_bytes_{name}_r{rank}_n{num}", cost.peak)
    run.figure("growth_bytes_per_microbatch_sealed", _worst(sealed, nums), "== 0")
    run.figure("growth_bytes_per_microbatch_fault", _worst(fault, nums), "> 0")
    held = max(costs[-1].held - costs[0].held for found in sealed.values() for costs in found)
    run.figure("held_growth_bytes_sealed", held, "== 0")
    return run.finish()


def measure(name: str, nums: tuple[int, ...], *, is_sealed: bool) -> list[list[Cost]]:
    """Costs of each rank, of each number of microbatches."""

    def rank(_: int) -> list[Cost]:
        original = base.seal
        if not is_sealed:
            base.seal = lambda output: output
        try:
            engine = make_engine(name, setting(HIDDEN, LAYERS, VOCAB, LENGTH), 2 * LENGTH, **OPTIONS[name])
            found = []
            for num in (2, *nums):  # the first makes the optimizer's state
                batch = packed(2 * num, LENGTH, VOCAB)
                with LiveStorages() as live:
                    outputs = engine.forward_backward(batch, LikelihoodWithEntropy())
                    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(outputs)}
                held = sum(item.nbytes for item in live.live() if item.storage._cdata not in kept)
                found.append(Cost(live.peak_bytes, held, sum(kept.values())))
                del outputs
                engine.optim_step()
            engine.close()
            return found[1:]
        finally:
            base.seal = original

    return ranks(rank, WORLDS[name])


def _tensors(outputs: list[base.MicrobatchOutput]) -> list[torch.Tensor]:
    found = []
    for output in outputs:
        found += [output.loss, output.logprobs] + ([] if output.entropy is None else [output.entropy])
        found += [tensor for ratio in output.metrics.values() for tensor in (ratio.total, ratio.count)]
    return found


def _worst(by_engine: dict[str, list[list[Cost]]], nums: tuple[int, ...]) -> float:
    """Bytes a microbatch, from the second number on: the first does not fill the pipeline."""
    growths = []
    for found in by_engine.values():
        for costs in found:
            first, last = costs[1], costs[-1]
            growths.append((last.peak - last.outputs - first.peak + first.outputs) / (nums[-1] - nums[1]))
    return max(0.0, *growths)


def _show(name: str, nums: tuple[int, ...], sealed: list[list[Cost]], fault: list[list[Cost]]) -> None:
    top = max(cost.peak for found in (*sealed, *fault) for cost in found)
    for rank in range(len(sealed)):
        print(f"\n{name}, rank {rank} of {len(sealed)}: peak live bytes, weights and optimizer aside")
        for label, costs in (("sealed", sealed[rank]), ("fault", fault[rank])):
            for num, cost in zip(nums, costs, strict=True):
                bar = "#" * round(50 * cost.peak / top)
                print(f"  {label:<7} {num:>3} microbatches {cost.peak:>12,}  {bar}")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", nargs="+", choices=sorted(WORLDS), default=sorted(WORLDS), help="which engines")


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
