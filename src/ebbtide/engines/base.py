"""The contract of a training engine, and the seal through which alone a microbatch's outputs leave it.

Order of events in `forward_backward`: the base cuts the batch into microbatches and counts its tokens over all ranks;
the engine's `_run_microbatches` runs each forward and hands the live statistics to `finish`, which computes the loss,
checks that it can reach the weights, seals what is kept, and returns the live loss; the engine runs its backward.
Nothing that requires grad survives a microbatch, so memory does not grow with their number.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, final

import torch
from pydantic import Field
from torch import Tensor, nn

from ebbtide.algorithms.base import LossInputs, Needs
from ebbtide.config import Component
from ebbtide.data.microbatch import Microbatch, Microbatches, microbatches, spread
from ebbtide.device import Device
from ebbtide.errors import DataError, EngineError, problem
from ebbtide.numerics.logprobs import TokenStats
from ebbtide.recipe import ModelSection, OptimSection
from ebbtide.types import BatchCounts, Ratio, TrainBatch
from ebbtide.weightsync.base import NamedTensor

__all__ = [
    "AdapterEngine",
    "EngineConfig",
    "EngineSetting",
    "Finish",
    "Loss",
    "MicrobatchOutput",
    "OptimStats",
    "Part",
    "TrainEngine",
    "seal",
]

Part = Literal["weights", "optimizer"]
"""What can be offloaded to the host."""


class EngineConfig(Component):
    """Base of every engine's `Config`."""

    max_tokens_per_microbatch: int = Field(8192, ge=1)
    """Tokens, prompts included, that one forward takes at most; a longer sequence is an error."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all of its completions, where that saves an eighth of the tokens."""


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """What every engine needs to know beside its own configuration.

    Attributes:
        model: which model, and in what dtypes.
        optim: optimizer and schedule.
        device: this rank's device.
        seed: of random initial weights.
        temperature: of the log-probs, the one the rollout samples with.
        num_steps: optimizer steps of the run, for the schedule.
        max_completion_tokens: token limit of a completion, for losses with a constant normaliser.
        answer: what the model says of a token: its log-prob, or, as a critic, the value of the state before it, which
            then stands wherever a log-prob would.
    """

    model: ModelSection
    optim: OptimSection
    device: Device
    seed: int
    temperature: float
    num_steps: int
    max_completion_tokens: int
    answer: Literal["logprob", "value"] = "logprob"


class Loss(Protocol):
    """The part of an algorithm that an engine calls."""

    @property
    def needs(self) -> Needs:
        """What the loss reads beside the policy's log-probs."""
        ...

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
        """See `Algorithm.loss`."""
        ...


@dataclass(frozen=True, slots=True)
class MicrobatchOutput:
    """What is kept of one microbatch; sealed, so no tensor in it holds a graph.

    Attributes:
        sequences: numbers of its sequences in the batch.
        loss: scalar, this microbatch's share of the batch's loss.
        logprobs: [T] float32 of the microbatch's tokens, 0 where not trained.
        entropy: [T] float32; None unless the loss needed it.
        metrics: name -> ratio, to be summed over microbatches and ranks.
    """

    sequences: tuple[int, ...]
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    metrics: Mapping[str, Ratio]


@dataclass(frozen=True, slots=True)
class OptimStats:
    """What one optimizer step did.

    Attributes:
        grad_norm: before clipping, over all ranks.
        lr: the learning rate used.
        is_skipped: the gradient was not finite, and nothing was changed.
    """

    grad_norm: float
    lr: float
    is_skipped: bool


Finish = Callable[[Microbatch, TokenStats], Tensor]
"""From a microbatch's live statistics to its live loss, sealing the rest."""


class TrainEngine(ABC):
    """One rank of a model in training.

    A subclass writes the abstract methods; `forward_backward` is the base's alone.
    """

    def __init__(self, config: EngineConfig, setting: EngineSetting) -> None:
        self._config = config
        self.setting = setting
        self._has_checked_reach = False

    @property
    def max_tokens(self) -> int:
        """What one forward takes at most."""
        return self._config.max_tokens_per_microbatch

    @property
    def data_place(self) -> tuple[int, int]:
        """(this rank's place, their number) among the ranks that are to be given different sequences of a batch.

        Ranks of one place, the stages of a pipeline for one, are to be given the same.
        """
        return 0, 1

    @final
    def forward_backward(self, batch: TrainBatch, loss: Loss) -> list[MicrobatchOutput]:
        """Add the gradient of the batch's loss; outputs of this rank's microbatches, sealed, in order.

        Args:
            batch: this rank's sequences of the global batch, on the host.
            loss: called once a microbatch.

        Raises:
            EngineError: a sequence is longer than the token budget; the loss does not reach the weights.
        """
        counts, pieces = self._agree(batch)
        outputs: dict[int, MicrobatchOutput] = {}

        def finish(microbatch: Microbatch, stats: TokenStats) -> Tensor:
            if microbatch.is_filler:
                return stats.logprobs.sum() * 0.0
            output, live_loss = self._judge(microbatch, stats, counts, loss)
            outputs[microbatch.index] = output
            return live_loss

        self._run_microbatches(pieces, finish, loss.needs)
        return self._shared([outputs[index] for index in sorted(outputs)])

    @abstractmethod
    def _run_microbatches(self, microbatches: Microbatches, finish: Finish, needs: Needs) -> None:
        """Forward, `finish` and backward of each; gradients accumulate."""

    @abstractmethod
    def optim_step(self) -> OptimStats:
        """Clip, step, and clear the gradients; a gradient that is not finite skips the step."""

    @abstractmethod
    def logprobs(self, batch: TrainBatch) -> Tensor:
        """[T] float32 under the present weights, without gradient; 0 where not trained."""

    @abstractmethod
    def named_weights(self) -> Iterator[NamedTensor]:
        """Every weight under its Hugging Face name, whole, one at a time; the tensor is valid until the next."""

    @abstractmethod
    def offload(self, *parts: Part) -> None:
        """Move parts to the host; a part that is there stays."""

    @abstractmethod
    def onload(self, *parts: Part) -> None:
        """Move parts back to the device."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write weights, optimizer and schedule to a folder."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Restore what `save` wrote."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; calling it again does nothing."""

    def _over_data_ranks(self, values: list[int], op: Literal["sum", "max"]) -> list[int]:
        """The values reduced over the ranks that hold different sequences; one rank has nobody to ask."""
        del op
        return values

    def _shared(self, outputs: list[MicrobatchOutput]) -> list[MicrobatchOutput]:
        """The outputs on every rank that holds these sequences, where not all of them compute the loss."""
        return outputs

    def _agree(self, batch: TrainBatch) -> tuple[BatchCounts, Microbatches]:
        """Counts of the global batch, and this rank's microbatches: as many as on every other rank, by fillers.

        Raises:
            DataError: this rank's batch cannot be cut.
            EngineError: another rank's cannot, so that no rank is left waiting for it.
        """
        local = batch.counts(self.setting.max_completion_tokens)
        pieces, failure = None, None
        try:
            max_tokens, device = self._config.max_tokens_per_microbatch, self.setting.device.torch
            pieces = microbatches(batch, max_tokens, device, keep_groups=self._config.share_prompts)
        except DataError as error:
            failure = error
        totals = self._over_data_ranks([local.num_tokens, local.num_sequences, int(failure is not None)], "sum")
        if failure is not None:
            raise failure
        if totals[2]:
            rule = f"{totals[2]} other ranks could not cut their part of it"
            raise EngineError(problem("batch", batch.num_sequences, rule, "Their own errors say why"))
        assert pieces is not None
        (num,) = self._over_data_ranks([len(pieces)], "max")
        return BatchCounts(totals[0], totals[1], local.max_completion_tokens), pieces.filled_up(num)

    def _judge(
        self, microbatch: Microbatch, stats: TokenStats, counts: BatchCounts, loss: Loss
    ) -> tuple[MicrobatchOutput, Tensor]:
        """The sealed output and the live loss."""
        batch = microbatch.batch
        logprobs_T = spread(stats.logprobs, batch.loss_mask)
        entropy_T = None if stats.entropy is None else spread(stats.entropy, batch.loss_mask)
        inputs = LossInputs(batch, counts, logprobs_T, entropy_T)
        if self.setting.answer == "value":
            inputs = LossInputs(batch, counts, torch.zeros_like(logprobs_T), values=logprobs_T)
        live_loss, metrics = loss.loss(inputs)
        self._check_live(live_loss, stats, microbatch)
        output = MicrobatchOutput(microbatch.sequences, live_loss, logprobs_T, entropy_T, metrics)
        sealed: MicrobatchOutput = seal(output)
        return sealed, live_loss

    def _check_live(self, live_loss: Tensor, stats: TokenStats, microbatch: Microbatch) -> None:
        """A detach in the wrong place leaves a loss that looks right and trains nothing."""
        if not live_loss.requires_grad:
            rule = "the loss does not require grad, so its backward would train nothing"
            where = (
                "logprobs do not require grad" if not stats.logprobs.requires_grad else "the algorithm detached them"
            )
            raise EngineError(problem(f"microbatches[{microbatch.index}].loss", float(live_loss), rule, where))
        if not self._has_checked_reach:
            self._check_reach(live_loss, f"microbatches[{microbatch.index}].loss", self._trained_weights())
            self._has_checked_reach = True

    def _check_reach(self, live: Tensor, where: str, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        """The graph of a loss, or of a stage's output, ends in every weight that it should train."""
        reached = _leaves(live)
        unreached = [name for name, weight in weights if id(weight) not in reached]
        if unreached:
            rule = f"its graph does not reach {len(unreached)} trained weights, the first of them {unreached[0]}"
            remedy = "Freeze what is not used, or look for a detach between the weights and the loss"
            raise EngineError(problem(where, float(live.detach().sum()), rule, remedy))

    def _trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Weights of this rank that the loss must reach, as they are inside a forward."""
        return iter(())


class AdapterEngine(Protocol):
    """What an engine that trains adapters over frozen weights can do beside."""

    def adapter_weights(self) -> Iterator[NamedTensor]:
        """The adapters' weights alone, under the names by which peft stores them; otherwise as `named_weights`."""
        ...

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """As `logprobs`, without the adapters: under the weights that the run began with, for no second model."""
        ...


def seal(value: Any) -> Any:
    """The same structure without a graph: no tensor in it, however nested, requires grad.

    Dicts, other mappings, lists, tuples, named tuples and dataclasses are walked; what needs no change is returned as
    the same object. A detached tensor that is a part of a larger storage is copied out, so that it does not keep the
    rest alive.
    """
    if isinstance(value, Tensor):
        return _sealed_tensor(value)
    if isinstance(value, Mapping):
        items = {key: seal(item) for key, item in value.items()}
        is_same = all(items[key] is item for key, item in value.items())
        return value if is_same else _rebuilt_mapping(value, items)
    if isinstance(value, list | tuple):
        parts = [seal(item) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
        new = {name: seal(item) for name, item in old.items()}
        return value if all(new[name] is old[name] for name in old) else dataclasses.replace(value, **new)
    return value


def _sealed_tensor(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    detached = tensor.detach()
    if type(detached) is not Tensor or detached.layout != torch.strided:
        return detached
    is_part = detached.untyped_storage().nbytes() > detached.numel() * detached.element_size()
    return detached.clone() if is_part else detached


def _rebuilt_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if hasattr(value, "copy") and hasattr(value, "__setitem__"):  # keeps default factories and batch sizes
        copy = value.copy()
        for key, item in items.items():
            copy[key] = item
        return copy
    return type(value)(items)  # type: ignore[call-arg]


def _leaves(loss: Tensor) -> set[int]:
    """Ids of the leaf tensors that the loss's graph ends in."""
    found: set[int] = set()
    seen: set[Any] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        pending.extend(following for following, _ in node.next_functions)
    return found
