"""The contract of an algorithm: groups to advantages, and the log-probs of a microbatch to a scalar loss.

Order of events in a step: `keep` filters groups (where `max_refills` allows, the loop generates replacements for those
dropped), `advantages` judges them all together, the loop packs them and adds the log-probs and values that the
algorithm `needs`, `prepare` completes the global batch; then the engine calls `loss` once a microbatch. A loss divides
by the counts of the whole global batch (`LossInputs.counts`) and by nothing local, so that microbatches, packing and
ranks never change the gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ebbtide.config import Component
from ebbtide.errors import CheckpointError, DataError, problem
from ebbtide.types import BatchCounts, Group, Ratio, TrainBatch

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "CriticAlgorithm",
    "LossInputs",
    "Needs",
    "check_batch",
    "check_groups",
    "refuse_state",
]


class Needs(Flag):
    """What a loss reads beside the policy's log-probs; the loop computes these and no others."""

    NOTHING = 0
    ENTROPY = auto()  # LossInputs.entropy, with gradient
    OLD_LOGPROBS = auto()  # TrainBatch.old_logprobs, recomputed under the policy before the update
    REF_LOGPROBS = auto()  # TrainBatch.ref_logprobs
    VALUES = auto()  # TrainBatch.values, the critic's before the update; and then `CriticAlgorithm.critic_loss`


class AlgorithmConfig(Component):
    """Base of every algorithm's `Config`."""

    min_group_size: ClassVar[int] = 1
    has_critic: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One microbatch as its loss sees it.

    Attributes:
        batch: the microbatch's sequences, packed.
        counts: of the whole global batch.
        policy_logprobs: [T] float32 with gradient, under the run's temperature; 0 where not trained.
        entropy: [T] float32 with gradient, likewise, in nats; None unless needed.
        values: [T] float32 with gradient, the critic's; None unless it is the critic that learns.
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

    @property
    def max_refills(self) -> int:
        """How often a step may generate again to replace groups that `keep` dropped; 0 trains on what is left."""
        ...

    def keep(self, group: Group) -> bool:
        """Whether a scored group is trained on."""
        ...

    def advantages(self, groups: Sequence[Group]) -> list[list[Tensor]]:
        """For each group, for each completion: [C] float32 or a scalar for all of its tokens.

        Zeros where only `prepare` can tell, from log-probs or values.
        """
        ...

    def prepare(self, batch: TrainBatch, counts: BatchCounts) -> tuple[TrainBatch, Mapping[str, Ratio]]:
        """Complete the global batch, once a step, after log-probs and values were added and before it is cut.

        Whatever needs the whole batch or those tensors happens here: KL in the reward, GAE, whitening, the weights
        that correct for a rollout policy other than the old one. The loss mask never changes, so neither do counts.
        """
        ...

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
        """This microbatch's share of the global batch's loss, a scalar; and metrics that sum over microbatches."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the configuration: plain numbers, empty for most algorithms."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
        ...


class CriticAlgorithm(Algorithm, Protocol):
    """An algorithm that trains a critic beside the policy: its `needs` have VALUES."""

    def critic_loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
        """The critic's share of its loss, from `inputs.values`, `batch.values` and `batch.returns`."""
        ...


def check_groups(groups: Sequence[Group], min_group_size: int) -> None:
    """Refuse groups that an algorithm cannot judge.

    Raises:
        DataError: a group without rewards, with a reward that is not finite, or with too few completions.
    """
    for index, group in enumerate(groups):
        where, size = f"groups[{index}]", len(group.completions)
        if size < min_group_size:
            remedy = "Raise batch.group_size, or choose an algorithm that judges completions alone"
            raise DataError(problem(f"{where}.completions", size, f"needs at least {min_group_size}", remedy))
        if group.rewards is None or group.rewards.shape != (size,):
            shape = None if group.rewards is None else tuple(group.rewards.shape)
            raise DataError(problem(f"{where}.rewards", shape, f"must be one reward a completion, shape ({size},)"))
        if not bool(torch.isfinite(group.rewards).all()):
            rule = "rewards must be finite"
            raise DataError(problem(f"{where}.rewards", group.rewards.tolist(), rule, "Mend the reward function"))


def check_batch(batch: TrainBatch) -> None:
    """Refuse a global batch on which any loss would be meaningless; costs a few vector operations.

    Raises:
        DataError: no trained token, or a trained token whose rollout log-prob or advantage is not finite.
    """
    if not bool(batch.loss_mask.any()):
        remedy = "Are all completions empty, or all groups filtered? Raise batch.prompts or sampling.max_tokens"
        raise DataError(problem("batch.loss_mask", 0, "must have at least one trained token", remedy))
    remedies = {
        "rollout_logprobs": "The rollout gave a sampled token no probability: do its sampling settings match the run's",
        "advantages": "Are the rewards finite",
        "old_logprobs": "Are the policy's weights finite",
        "ref_logprobs": "Are the reference policy's weights finite, and its dtype wide enough",
        "values": "Has the critic diverged? Lower its learning rate",
    }
    for name, remedy in remedies.items():
        values_T = getattr(batch, name)
        if values_T is None:
            continue
        broken_T = batch.loss_mask & ~torch.isfinite(values_T)
        if bool(broken_T.any()):
            t = int(broken_T.nonzero()[0])
            where = f"batch.{name}[{t}] (sequence {int(batch.sequence_ids[t])})"
            rule = f"must be finite on a trained token, and {int(broken_T.sum())} are not"
            raise DataError(problem(where, float(values_T[t]), rule, remedy))


def refuse_state(algorithm: Algorithm, state: Mapping[str, Any]) -> None:
    """What `load_state` of an algorithm without a state does.

    Raises:
        CheckpointError: the state holds something, and so is another algorithm's.
    """
    if state:
        rule = f"{type(algorithm).__name__} keeps no state"
        raise CheckpointError(problem("algorithm.state", sorted(state), rule, "Resume with the run's own recipe"))
