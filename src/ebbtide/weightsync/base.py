"""The contract of a weight transport: who sends, who receives, and what has happened when each call returns.

One push: the sender's `send` and every receiver's `receive` run at the same time. `load` is called with tensors that
may be views of memory the sender will use again: they are valid until `load` returns, and a consumer that wants to
keep one copies it. `send` returns when every receiver has let go of every view; either side failing, dying or staying
silent beyond the deadline ends both calls with `WeightSyncError`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

__all__ = [
    "DEFAULT_DEADLINE_S",
    "Addressed",
    "Load",
    "NamedTensor",
    "PushReport",
    "WeightReceiver",
    "WeightSender",
    "WeightTransport",
]

DEFAULT_DEADLINE_S = 30.0
"""How long either side waits for the next sign of the other."""

NamedTensor = tuple[str, Tensor]
"""A weight under its Hugging Face name."""

Load = Callable[[Sequence[NamedTensor]], None]
"""Takes some of the weights; called many times a push, each weight in exactly one call, or in slices."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What one push moved.

    Attributes:
        version: the policy version that the receivers now have.
        num_bytes: payload, counted once whatever the number of receivers.
        num_tensors: weights.
        seconds: from the first frame to the last acknowledgement.
        kind: all weights, only those that changed, or an adapter's.
        digest: over all buckets, the same on both sides; None where the push had none.
    """

    version: int
    num_bytes: int
    num_tensors: int
    seconds: float
    kind: Literal["full", "delta", "adapter"] = "full"
    digest: int | None = None


class WeightSender(Protocol):
    """The trainer's half."""

    async def send(self, weights: Iterable[NamedTensor], version: int) -> PushReport:
        """Push all weights; on return no receiver holds a view of the sender's memory."""
        ...

    async def close(self) -> None:
        """Release what is kept between pushes."""
        ...


class WeightReceiver(Protocol):
    """The rollout's half."""

    async def receive(self, load: Load, version: int) -> None:
        """Take one push of exactly this version, through `load`."""
        ...

    async def close(self) -> None:
        """Release what is kept between pushes."""
        ...


class WeightTransport(WeightSender, WeightReceiver, Protocol):
    """Both halves in one object, where both live in one process."""


@runtime_checkable
class Addressed(Protocol):
    """A transport that receivers in other processes can reach; a rollout hands the address to its workers."""

    @property
    def address(self) -> str:
        """For `SocketReceiver`."""
        ...
