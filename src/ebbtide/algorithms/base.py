"""The contract of an algorithm: groups to advantages, and the log-probs of a microbatch to a scalar loss.

Order of events in a step: `keep` filters groups, `advantages` judges them all together, the loop packs them and adds
the log-probs that the algorithm `needs`; then the engine calls `loss` once a microbatch. A loss divides by the counts
of the whole global batch (`LossInputs.counts`) and by nothing local, so that microbatches, packing and ranks never
change the gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import ClassVar, Protocol

from torch import Tensor

from ebbtide.config import Component
from ebbtide.types import BatchCounts, Group, Ratio, TrainBatch

__all__ = ["Algorithm", "AlgorithmConfig", "LossInputs", "Needs"]


class Needs(Flag):
    """What a loss reads beside the policy's log-probs; the loop computes these and no others."""

    NOTHING = 0
    ENTROPY = auto()  # LossInputs.entropy, with gradient
    OLD_LOGPROBS = auto()  # TrainBatch.old_logprobs, recomputed under the policy before the update
    REF_LOGPROBS = auto()  # TrainBatch.ref_logprobs
    VALUES = auto()  # TrainBatch.values and .returns, and LossInputs.values with gradient


class AlgorithmConfig(Component):
    """Base of every algorithm's `Config`."""

    min_group_size: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One microbatch as its loss sees it.

    Attributes:
        batch: the microbatch's sequences, packed.
        counts: of the whole global batch.
        policy_logprobs: [T] float32 with gradient, under the run's temperature; 0 where not trained.
        entropy: [T] float32 with gradient, likewise, in nats; None unless needed.
        values: [T] float32 with gradient; None unless needed.
    """

    batch: TrainBatch
    counts: BatchCounts
    policy_logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


class Algorithm(Protocol):
    """What `loop/` and `engines/` call."""

    @property
    def needs(self) -> Needs:
        """What must be computed before and with the loss."""
        ...

    def keep(self, group: Group) -> bool:
        """Whether a scored group is trained on."""
        ...

    def advantages(self, groups: Sequence[Group]) -> list[list[Tensor]]:
        """For each group, for each completion: [C] float32 or a scalar for all of its tokens."""
        ...

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
        """This microbatch's share of the global batch's loss, a scalar; and metrics that sum over microbatches."""
        ...
