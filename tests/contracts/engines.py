"""What every training engine promises, as checks that tests, faults and benchmarks call; and the meshes they run on."""

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ebbtide import plugins
from ebbtide.algorithms.base import LossInputs, Needs
from ebbtide.algorithms.sft import SFT
from ebbtide.device import Device
from ebbtide.engines import links
from ebbtide.engines.base import EngineSetting, MicrobatchOutput
from ebbtide.engines.mesh_engine import MeshEngine
from ebbtide.memory.live import LiveStorages
from ebbtide.recipe import ModelSection, OptimSection
from ebbtide.types import Ratio, TrainBatch
from tests.conftest import ALPHABET, TINY
from tests.multiprocess import forked

__all__ = [
    "MESHES",
    "Held",
    "Mesh",
    "NestedLoss",
    "check_leaves_nothing",
    "equal_batch",
    "held_after",
    "make_engine",
    "mine",
    "ragged_batch",
    "run",
    "setting",
    "sft",
]

T = TypeVar("T")
_NUM_READINGS = 5
_PAUSE_S = 0.01


@dataclass(frozen=True, eq=False)
class Mesh:
    """An engine over some ranks.

    Attributes:
        engine: the plugin's name.
        world: ranks.
        options: of its `Config`.
        is_core: whether the tests that everyone waits for use it.
    """

    engine: str
    world: int
    options: Mapping[str, Any] = field(default_factory=dict)
    is_core: bool = False

    @property
    def is_deep(self) -> bool:
        """Whether there are more than two stages."""
        return int(self.options.get("pp", 1)) * int(self.options.get("stages_per_rank", 1)) > 2

    def __str__(self) -> str:
        described = "-".join(f"{name}{value:d}" for name, value in self.options.items())
        return f"{self.engine}-{self.world}" + (f"-{described}" if described else "")


# Each engine's meshes; a new engine is tested by being there and by having some here.
MESHES: dict[str, list[Mesh]] = {
    "fsdp": [
        Mesh("fsdp", 1, {}, is_core=True),
        Mesh("fsdp", 2, {}, is_core=True),
        Mesh("fsdp", 2, {"tp": 2}, is_core=True),
        Mesh("fsdp", 2, {"dp_replicate": 2}),
        Mesh("fsdp", 2, {"reshard_after_forward": False}),
        Mesh("fsdp", 2, {"sync_every_microbatch": True}),
        Mesh("fsdp", 4, {}),
        Mesh("fsdp", 4, {"dp_replicate": 2}),
        Mesh("fsdp", 4, {"tp": 2}),
        Mesh("fsdp", 4, {"dp_replicate": 2, "tp": 2}),
    ],
    "pipeline": [
        Mesh("pipeline", 2, {"pp": 2}, is_core=True),
        Mesh("pipeline", 4, {"pp": 2}, is_core=True),
        Mesh("pipeline", 1, {"pp": 1}),
        Mesh("pipeline", 2, {"pp": 2, "stages_per_rank": 2}),
        Mesh("pipeline", 4, {"pp": 4}),
        Mesh("pipeline", 4, {"pp": 2, "tp": 2}),
        Mesh("pipeline", 4, {"pp": 2, "dp_replicate": 2}),
        Mesh("pipeline", 4, {"pp": 2, "stages_per_rank": 2}),
    ],
}


class NestedLoss:
    """Maximum likelihood that asks for an entropy, leaves it out of the loss, and reports it alive, in a metric."""

    needs = Needs.ENTROPY

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
        assert inputs.entropy is not None
        mask_T = inputs.batch.loss_mask
        loss = -(inputs.policy_logprobs * mask_T).sum() / inputs.counts.num_tokens
        return loss, {"live/entropy_nats": Ratio(inputs.entropy.sum(), inputs.policy_logprobs.exp().sum())}


def setting(
    model_type: str = "qwen3",
    *,
    num_layers: int = 2,
    optim: OptimSection | None = None,
    compute_dtype: Any = None,
    **fields: Any,
) -> EngineSetting:
    """A tiny model with random weights, the same on all ranks; a field given as `...` is left out."""
    described = {"model_type": model_type, **TINY, "num_hidden_layers": num_layers, **fields}
    architecture = {name: value for name, value in described.items() if value is not ...}
    return EngineSetting(
        model=ModelSection(architecture=architecture, alphabet=ALPHABET, compute_dtype=compute_dtype),
        optim=optim or OptimSection(lr=1e-3),
        device=Device("cpu"),
        seed=0,
        temperature=1.0,
        num_steps=8,
        max_completion_tokens=16,
    )


def make_engine(mesh: Mesh, how: EngineSetting, *, max_tokens: int = 32, **options: Any) -> MeshEngine:
    """This rank's engine."""
    cls = plugins.load("engines", mesh.engine)
    config = cls.Config(max_tokens_per_microbatch=max_tokens, **{**mesh.options, **options})
    engine: MeshEngine = cls(config, how)
    return engine


def run(mesh: Mesh, fn: Callable[[int], T], timeout_s: float = 60.0) -> list[T]:
    """`fn(rank)` on every rank of the mesh; in this process where there is one alone."""
    return [fn(0)] if mesh.world == 1 else forked(fn, mesh.world, timeout_s)


def equal_batch(num_microbatches: int, max_tokens: int = 32) -> TrainBatch:
    """Microbatches of one length, two sequences each."""
    prompt, completion = torch.arange(4), torch.arange(max_tokens // 2 - 4) % 10
    sequence = (prompt, completion, torch.zeros(len(completion)))
    return TrainBatch.pack([sequence] * (2 * num_microbatches), advantages=[torch.tensor(1.0)] * (2 * num_microbatches))


def ragged_batch(num: int, seed: int = 1) -> TrainBatch:
    """Sequences of 6 to 16 tokens in groups of three that share their prompt."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for b in range(num):
        group = torch.Generator().manual_seed(b // 3)
        prompt = torch.randint(0, 30, (3 + (b // 3) % 4,), generator=group)
        length = 3 + (b * 7) % 8
        completion = torch.randint(0, 30, (length,), generator=generator)
        sequences.append((prompt, completion, torch.zeros(length)))
    advantages = [torch.tensor(0.5 + (b % 5) / 4) for b in range(num)]
    return TrainBatch.pack(sequences, advantages=advantages, group_ids=[b // 3 for b in range(num)])


def mine(engine: MeshEngine, batch: TrainBatch) -> TrainBatch:
    """This rank's sequences: every n-th."""
    place, num = engine.data_place
    return batch.select(list(range(place, batch.num_sequences, num)))


def sft() -> SFT:
    """A loss without surprises."""
    return SFT(SFT.Config())


@dataclass(frozen=True)
class Held:
    """What a rank holds once a batch is done, its outputs aside.

    Attributes:
        num_bytes: live storages made since the start: gradients.
        num_buffers: receive buffers that are still alive.
        peak_buffers: receive buffers alive at one time, at most.
        peak_bytes: live storages at one time, at most, the outputs among them.
        output_bytes: of the outputs.
        weight_bytes: of the weights of this rank's parts, gathered.
    """

    num_bytes: int
    num_buffers: int
    peak_buffers: int
    peak_bytes: int
    output_bytes: int
    weight_bytes: int


def held_after(engine: MeshEngine, num_microbatches: int, max_tokens: int = 32) -> Held:
    """Train on a batch of microbatches of one length, without the help of the garbage collector."""
    buffers: list[weakref.ref[torch.UntypedStorage]] = []
    peak = [0]
    original = links.fresh_buffer

    def noted(*args: Any) -> Tensor:
        buffer = original(*args)
        buffers.append(weakref.ref(buffer.untyped_storage()))
        peak[0] = max(peak[0], sum(ref() is not None for ref in buffers))
        return buffer

    batch = equal_batch(num_microbatches, max_tokens)
    links.fresh_buffer = noted  # type: ignore[assignment]
    gc.disable()
    try:
        with LiveStorages() as live:
            outputs = engine.forward_backward(batch, NestedLoss())
        assert len(outputs) == num_microbatches, len(outputs)
        stored = {storage._cdata: storage.nbytes() for storage in _storages(outputs)}
        # Threads of the communication let go of a message's memory a moment after it was waited for.
        readings = []
        for _ in range(_NUM_READINGS):
            readings.append(sum(item.nbytes for item in live.live() if item.storage._cdata not in stored))
            time.sleep(_PAUSE_S)
        num_alive = sum(ref() is not None for ref in buffers)
        weights = sum(weight.numel() * weight.element_size() for weight in engine._parameters())
        found = Held(min(readings), num_alive, peak[0], live.peak_bytes, sum(stored.values()), weights)
    finally:
        gc.enable()
        links.fresh_buffer = original
    engine.optim_step()
    return found


def check_leaves_nothing(
    mesh: Mesh, nums: Sequence[int] = (2, 8, 32), *, compute_dtype: Any = None, **options: Any
) -> list[list[Held]]:
    """Live bytes and buffers after a batch do not depend on its number of microbatches, on any rank.

    Raises:
        AssertionError: they do.
    """
    is_adapted = "lora" in options

    def held(_: int) -> list[Held]:
        num_stages = int(mesh.options.get("pp", 1)) * int(mesh.options.get("stages_per_rank", 1))
        how = setting(num_layers=num_stages, compute_dtype=compute_dtype)
        engine = make_engine(mesh, how, share_prompts=False, **options)
        if is_adapted:
            for part in engine._parts:
                if part.span.is_first:
                    part.model.enable_input_require_grads()
        held_after(engine, 2)  # makes the optimizer's state, and has the weights' reach checked
        found = [held_after(engine, num) for num in nums]
        engine.close()
        return found

    by_rank = run(mesh, held)
    for rank, found in enumerate(by_rank):
        assert len({item.num_bytes for item in found}) == 1, f"rank {rank} of {mesh} holds {found}"
        assert not any(item.num_buffers for item in found), f"rank {rank} of {mesh} keeps receive buffers: {found}"
    for rank, found in enumerate(by_rank):
        long, longer = found[-2:]  # both fill the pipeline, as two microbatches may not
        assert long.peak_buffers == longer.peak_buffers, f"rank {rank} of {mesh}: {found}"
        growth, stored = longer.peak_bytes - long.peak_bytes, longer.output_bytes - long.output_bytes
        rule = f"rank {rank} of {mesh}: the peak grows by {growth} bytes, the outputs by {stored}"
        # Gathered weights are freed when the thread that gathered them gets to it, so that peaks vary by as much.
        assert growth <= stored + longer.weight_bytes, rule
    return by_rank


def _storages(outputs: Iterable[MicrobatchOutput]) -> Iterator[torch.UntypedStorage]:
    for output in outputs:
        yield from (output.loss.untyped_storage(), output.logprobs.untyped_storage())
        if output.entropy is not None:
            yield output.entropy.untyped_storage()
        for ratio in output.metrics.values():
            yield from (ratio.total.untyped_storage(), ratio.count.untyped_storage())
