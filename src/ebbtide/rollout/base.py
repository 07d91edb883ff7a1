"""The contract of a rollout backend, and its three states.

    awake(version) --sleep(level)--> asleep(level) --wake("weights")--> loading(version) --receive_weights--> awake
    awake(version) --receive_weights(version + 1)--> loading(version + 1) --all weights arrived--> awake(version + 1)

Generation happens only in `awake`, and only from the version that was announced last. A push that fails leaves
`loading`, and nothing but a complete push leads out of it. Control calls never wait behind generation.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from ebbtide.config import Component
from ebbtide.device import Device
from ebbtide.errors import RolloutError, problem
from ebbtide.types import Completion, GenerateRequest
from ebbtide.weightsync.base import WeightReceiver

__all__ = [
    "Asleep",
    "Awake",
    "Loading",
    "RolloutBackend",
    "RolloutConfig",
    "RolloutSetting",
    "RolloutState",
    "SharesTensors",
    "require_awake",
]


class RolloutConfig(Component):
    """Base of every backend's `Config`."""


@dataclass(frozen=True, slots=True)
class Awake:
    """Ready to generate from these weights."""

    version: int


@dataclass(frozen=True, slots=True)
class Asleep:
    """Memory given back: level 1 can restore its weights by itself, level 2 needs a push."""

    level: Literal[1, 2]


@dataclass(frozen=True, slots=True)
class Loading:
    """Weights are arriving, or a push broke off and they are torn."""

    version: int


RolloutState = Awake | Asleep | Loading


@dataclass(frozen=True, slots=True)
class RolloutSetting:
    """What every backend needs to know beside its own configuration.

    Attributes:
        model_config: the transformers config.
        dtype: what generation computes in.
        device: where.
        eos_ids: tokens that end a completion.
        decode: token ids to text, for stop strings; None where there is no tokenizer.
    """

    model_config: Any
    dtype: torch.dtype
    device: Device
    eos_ids: tuple[int, ...]
    decode: Callable[[list[int]], str] | None = None


class RolloutBackend(Protocol):
    """Token ids in; token ids and the log-probs of the distribution really sampled from, out."""

    @property
    def state(self) -> RolloutState:
        """Where the backend stands."""
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Completions as they finish, in any order, each request answered once.

        While paused, requests wait. Closing the iterator cancels what is unfinished.

        Raises:
            RolloutError: not awake; a prompt that leaves no room in the context.
        """
        ...

    async def pause(self) -> None:
        """Stop decoding at the next token; unfinished requests keep their tokens and log-probs."""
        ...

    async def resume(self) -> None:
        """Go on, under the current weights; each token carries the version that produced it."""
        ...

    async def receive_weights(self, version: int, source: WeightReceiver) -> None:
        """Replace all weights by those of `version`; caches computed from the old ones are dropped.

        Raises:
            RolloutError: asleep, or generating and not paused.
            WeightSyncError: the push broke off; the state is then `Loading(version)`.
        """
        ...

    async def sleep(self, level: Literal[1, 2]) -> None:
        """Give memory back until `wake`; level 2 drops the weights too."""
        ...

    async def wake(self, what: Literal["weights", "cache", "all"] = "all") -> None:
        """Take memory again; after level 2 the state is `Loading` until a push has come."""
        ...

    async def close(self) -> None:
        """Release everything; calling it again does nothing."""
        ...


@runtime_checkable
class SharesTensors(Protocol):
    """A source of weights whose tensors are the sender's own and stay valid after `load`: they may be kept.

    Other sources lend views of a buffer that is filled again.
    """

    @property
    def shares_tensors(self) -> Literal[True]:
        """The mark of such a source."""
        ...


def require_awake(state: RolloutState, version: int | None = None) -> int:
    """The version to generate from.

    Raises:
        RolloutError: not awake, or awake with another version than the one wanted.
    """
    if not isinstance(state, Awake):
        remedy = (
            "Push weights first" if isinstance(state, Loading) else "Wake it, and push where its weights were dropped"
        )
        raise RolloutError(problem("rollout.state", state, "generation needs a backend that is awake", remedy))
    if version is not None and state.version != version:
        rule = f"weights of version {version} were announced"
        raise RolloutError(problem("rollout.state", state, rule, "Push them before generating"))
    return state.version
