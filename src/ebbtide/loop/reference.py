"""The policy as it was at the start of the run, frozen, for KL terms."""

from typing import Protocol

import torch
from torch import Tensor

from ebbtide.device import Device
from ebbtide.engines.base import AdapterEngine
from ebbtide.models.build import build_model, torch_dtype
from ebbtide.models.policy import Policy, batch_logprobs
from ebbtide.recipe import ModelSection
from ebbtide.types import TrainBatch

__all__ = ["AdapterReference", "Reference", "ScoresReference"]


class ScoresReference(Protocol):
    """What the loop wants of a reference policy."""

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """[T] float32 on the host, 0 where not trained."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


class AdapterReference:
    """The base under an engine's adapters: no second model in memory."""

    def __init__(self, engine: AdapterEngine) -> None:
        self._engine = engine

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """See `ScoresReference.logprobs`."""
        return self._engine.reference_logprobs(batch)

    def close(self) -> None:
        """Nothing is its own."""


class Reference:
    """Log-probs under the initial weights, in the compute dtype."""

    def __init__(self, model: ModelSection, device: Device, *, seed: int, temperature: float, max_tokens: int) -> None:
        dtype = torch_dtype(model.compute_dtype or model.dtype)
        frozen = build_model(model, dtype=dtype, seed=seed).to(device.torch).eval().requires_grad_(False)
        self._policy = Policy(frozen)
        self._device = device
        self._temperature = temperature
        self._max_tokens = max_tokens

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """[T] float32 on the host, 0 where not trained."""
        return batch_logprobs(self._policy, batch, self._temperature, self._max_tokens, self._device)

    def close(self) -> None:
        """Release the weights."""
        self._policy.to(torch.device("meta"))
