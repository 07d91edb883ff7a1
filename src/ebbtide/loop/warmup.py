"""Supervised training on demonstrations, before reinforcement: it writes a checkpoint that the run starts from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ebbtide.algorithms.sft import SFT
from ebbtide.data.prompts import Prompts
from ebbtide.data.sampler import Sampler
from ebbtide.engines.base import TrainEngine
from ebbtide.errors import ConfigError, problem
from ebbtide.recipe import WarmupSection
from ebbtide.types import Prompt, TrainBatch

__all__ = ["demonstrations", "warm_up"]


def demonstrations(
    prompts: Sequence[Prompt], source: Any, encode: Callable[[str], Sequence[int]], eos: int
) -> TrainBatch:
    """Prompts with a demonstration each, ended by the end-of-sequence token.

    Raises:
        ConfigError: the source has no demonstrations.
    """
    demonstrate = getattr(source, "demonstration", None)
    if demonstrate is None:
        raise ConfigError(problem("warmup", type(source).__name__, "this data source has no demonstrations"))
    answers = [torch.tensor([*encode(demonstrate(prompt.index)), eos]) for prompt in prompts]
    return TrainBatch.pack(
        [(prompt.token_ids, answer, torch.zeros(len(answer))) for prompt, answer in zip(prompts, answers, strict=True)],
        advantages=[torch.ones(()) for _ in answers],
    )


def warm_up(
    section: WarmupSection,
    engine: TrainEngine,
    prompts: Prompts,
    seed: int,
    encode: Callable[[str], Sequence[int]],
    eos: int,
    on_step: Callable[[int, Mapping[str, float]], None],
) -> float:
    """Train for the section's steps; the last step's loss in nats a token.

    Args:
        section: how long and how fast.
        engine: on the initial weights, with the warm-up's own schedule.
        prompts: of a source with demonstrations.
        seed: of the order.
        encode: text to token ids.
        eos: token that ends a demonstration.
        on_step: called with each step, counted from 1, and its loss.
    """
    sampler = Sampler(len(prompts), section.examples, seed)
    loss = SFT(SFT.Config())
    last = float("nan")
    for step in range(section.steps):
        batch = demonstrations(prompts.next(sampler), prompts.source, encode, eos)
        outputs = engine.forward_backward(batch, loss)
        engine.optim_step()
        last = sum(float(output.loss) for output in outputs)
        on_step(step + 1, {"warmup/loss_nats": last})
    return last
