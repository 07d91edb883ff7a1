"""Tokens per second of the training engines against a plain loop of transformers and AdamW, on the same packed batch.

All take the same microbatches of sequences of one length and the same optimizer, in turns, so that other load on the
machine hits them alike. The plain loop packs a microbatch in one row by position_ids, computes whole logits, and
lets transformers attend by sdpa; `rows` is the same loop with one sequence a row: what packing by hand can reach where
all lengths are equal. Several ranks share this machine's cores, so that their figures show overhead, not scaling.

Figures:
    tokens_per_s_ratio_plain    fsdp on one rank, to the plain loop
    tokens_per_s_ratio_rows     fsdp on one rank, to the loop over rows
    tokens_per_s_<what>         of plain, rows, fsdp1, fsdp2, pipeline2
"""

import copy
import time
from collections.abc import Callable

import torch
from _engines import make_engine, packed, ranks, setting
from _record import Run
from transformers import AutoModelForCausalLM

from ebbtide.algorithms.sft import SFT
from ebbtide.models.build import load_config
from ebbtide.types import TrainBatch

VOCAB, HIDDEN, LAYERS, LENGTH = 4096, 192, 4, 96
PER_MICROBATCH, NUM_MICROBATCHES = 4, 3
NUM_TOKENS = PER_MICROBATCH * NUM_MICROBATCHES * LENGTH
HOW = setting(HIDDEN, LAYERS, VOCAB, LENGTH)


def main() -> int:
    run = Run("train_throughput", __doc__)
    rounds = 5 if run.args.quick else 15
    batch = packed(PER_MICROBATCH * NUM_MICROBATCHES, LENGTH, VOCAB)
    one = engine_step("fsdp", batch)
    steps = {"plain": plain_step(batch, is_packed=True), "rows": plain_step(batch, is_packed=False), "fsdp1": one}
    times = in_turns(steps, rounds)
    for name, options in (("fsdp2", {}), ("pipeline2", {"pp": 2})):
        times[name] = over_ranks(name.rstrip("2"), batch, rounds, options)
    for name, seconds in times.items():
        run.figure(f"tokens_per_s_{name}", [NUM_TOKENS / value for value in seconds])
    for name, target in (("plain", ">= 0.95"), ("rows", None)):
        ratios = [theirs / ours for theirs, ours in zip(times[name], times["fsdp1"], strict=True)]
        run.figure(f"tokens_per_s_ratio_{name}", ratios, target)
    return run.finish()


def in_turns(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, round by round, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def over_ranks(name: str, batch: TrainBatch, rounds: int, options: dict[str, int]) -> list[float]:
    """Seconds of the slowest of two ranks, round by round."""

    def rank(index: int) -> list[float]:
        mine = batch if "pp" in options else batch.select(list(range(index, batch.num_sequences, 2)))
        return in_turns({"step": engine_step(name, mine, **options)}, rounds)["step"]

    return [max(pair) for pair in zip(*ranks(rank, 2), strict=True)]


def engine_step(name: str, batch: TrainBatch, **options: int) -> Callable[[], object]:
    engine = make_engine(name, HOW, PER_MICROBATCH * LENGTH, **options)
    loss = SFT(SFT.Config())

    def step() -> object:
        engine.forward_backward(batch, loss)
        return engine.optim_step()

    return step


def plain_step(batch: TrainBatch, *, is_packed: bool) -> Callable[[], object]:
    """What one would write without any framework."""
    torch.manual_seed(HOW.seed)
    config = copy.deepcopy(load_config(HOW.model))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=HOW.optim.lr, weight_decay=0.0, fused=True)
    total = int(batch.loss_mask.sum())
    shape = (1, PER_MICROBATCH * LENGTH) if is_packed else (PER_MICROBATCH, LENGTH)
    pieces = [
        [part.view(shape) for part in (piece.tokens, piece.position_ids, piece.loss_mask)]
        for piece in (
            batch.select(list(range(start, start + PER_MICROBATCH)))
            for start in range(0, batch.num_sequences, PER_MICROBATCH)
        )
    ]

    def step() -> object:
        for tokens, position_ids, mask in pieces:
            logits = model(input_ids=tokens, position_ids=position_ids, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
            loss = -(logprobs * mask[:, 1:]).sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads that wait for one another measure the machine's other load
    raise SystemExit(main())
