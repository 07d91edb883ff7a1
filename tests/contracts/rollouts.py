"""What the contract of rollout backends needs to know of each: how to make one, and what it draws from."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ebbtide.device import Device
from ebbtide.models.build import build_model, load_config, load_tokenizer
from ebbtide.recipe import ModelSection
from ebbtide.rollout.base import RolloutBackend, RolloutSetting, RolloutState
from ebbtide.rollout.fake import FakeRollout
from ebbtide.rollout.inprocess import InProcessRollout
from ebbtide.types import Completion, GenerateRequest, SamplingParams
from ebbtide.weightsync.base import NamedTensor, WeightTransport
from ebbtide.weightsync.inprocess import InProcessTransport
from ebbtide.weightsync.push import push

__all__ = [
    "CONTEXT",
    "EOS",
    "MAKERS",
    "VOCABULARY",
    "Harness",
    "answers",
    "decode",
    "model_of",
    "opened",
    "request",
    "setting",
    "weights",
]

ALPHABET = "0123456789<>"
VOCABULARY, CONTEXT, EOS = 15, 48, 1
SECTION = ModelSection(
    alphabet=ALPHABET,
    architecture={
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    },
)


@dataclass(frozen=True)
class Harness:
    """A backend under test.

    Attributes:
        rollout: without weights.
        transport: that the backend takes weights from.
        logits: (token ids so far, version) -> [V] float32, what the next token is drawn from before sampling
            parameters apply.
        bound: of log-probs, in nats.
    """

    rollout: RolloutBackend
    transport: WeightTransport
    logits: Callable[[list[int], int], Tensor]
    bound: float = 1e-5

    def state(self) -> RolloutState:
        """Where the backend stands now."""
        return self.rollout.state

    async def push(self, version: int, given: Iterable[NamedTensor] | None = None) -> None:
        """Bring the weights of the version."""
        await push(weights(version) if given is None else given, self.transport, self.rollout, version)


@cache
def model_of(version: int) -> Any:
    """Another model for each version, far enough from uniform that sampling parameters matter."""
    model = build_model(SECTION, dtype=torch.float32, seed=version)
    with torch.no_grad():
        for name, item in model.named_parameters():
            if item.dim() > 1:
                item.mul_(12.0 if "embed" in name else 8.0)
    return model.eval().requires_grad_(False)


def weights(version: int) -> list[NamedTensor]:
    """As an engine of this version names them."""
    return list(model_of(version).named_parameters())


@cache
def own_model(version: int) -> Any:
    """The same weights under transformers' own attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(load_config(SECTION), dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(model_of(version).state_dict())
    return model.eval()


@torch.no_grad()
def own_logits(tokens: list[int], version: int) -> Tensor:
    logits: Tensor = own_model(version)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


@cache
def _tokenizer() -> Any:
    return load_tokenizer(SECTION)


def decode(token_ids: list[int]) -> str:
    """As a run does it."""
    text: str = _tokenizer().decode(token_ids, skip_special_tokens=True)
    return text


def setting() -> RolloutSetting:
    return RolloutSetting(load_config(SECTION), torch.float32, Device("cpu"), (EOS,), decode)


def _inprocess(**config: Any) -> Harness:
    rollout = InProcessRollout(InProcessRollout.Config(**{"max_concurrent": 64, **config}), setting())
    return Harness(rollout, InProcessTransport(), own_logits)


def _fake(**config: Any) -> Harness:
    del config
    rollout = FakeRollout(FakeRollout.Config(spread=4.0), setting())

    def logits(tokens: list[int], version: int) -> Tensor:
        return rollout.logits(torch.tensor([tokens[-1]]), torch.tensor([len(tokens) - 1]), version)[0]

    return Harness(rollout, InProcessTransport(), logits)


MAKERS: dict[str, Callable[..., Harness]] = {"fake": _fake, "inprocess": _inprocess}
"""How each backend of the folder is made."""


@asynccontextmanager
async def opened(name: str, version: int | None = 0, **config: Any) -> AsyncIterator[Harness]:
    """A backend with the weights of `version`; None leaves it without."""
    harness = MAKERS[name](**config)
    try:
        if version is not None:
            await harness.push(version)
        yield harness
    finally:
        await harness.rollout.close()
        await harness.transport.close()


def request(
    request_id: int, prompt: Sequence[int], prefix: Completion | None = None, **sampling: Any
) -> GenerateRequest:
    """One request; the seed is its id where none is given."""
    seed = sampling.pop("seed", request_id)
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return GenerateRequest(request_id, torch.tensor(prompt, dtype=torch.long), params, seed, prefix)


async def answers(rollout: RolloutBackend, requests: Sequence[GenerateRequest]) -> dict[int, Completion]:
    """All completions by id; each request is answered once."""
    found: dict[int, Completion] = {}
    async for completion in rollout.generate(requests):
        assert completion.request_id not in found
        found[completion.request_id] = completion
    assert found.keys() == {item.request_id for item in requests}
    return found
