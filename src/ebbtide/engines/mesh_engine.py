"""What engines over a device mesh share: building, stepping, exporting, moving and storing a policy.

A rank holds one or more parts of the model: all of it under `fsdp`, some of its layers under `pipeline`. How
microbatches pass through the parts is left to those two.
"""

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.data.microbatch import Microbatch, Microbatches, join
from ebbtide.engines import checkpoint
from ebbtide.engines import lora as adapters
from ebbtide.engines.base import EngineConfig, EngineSetting, OptimStats, Part, TrainEngine
from ebbtide.engines.mesh import Axes, Ranks
from ebbtide.engines.optim import gradient_norm, local_gradients, lr_factor, make_optimizer, scale_gradients
from ebbtide.engines.sharding import WeightsInForward, fsdp_modules, gathered, release, shard
from ebbtide.engines.tensor_parallel import parallelize
from ebbtide.errors import ConfigError, EngineError, problem
from ebbtide.models.build import build_model, load_config, stored_buffers, torch_dtype
from ebbtide.models.critic import Critic, give_value_head
from ebbtide.models.policy import Policy
from ebbtide.models.stage import Inlet, decoder_layers, spans
from ebbtide.types import TrainBatch
from ebbtide.weightsync.base import NamedTensor

__all__ = ["MeshConfig", "MeshEngine"]


class MeshConfig(EngineConfig):
    """Base of the `Config` of engines over a mesh."""

    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward, and compute the layer again there."""
    dp_replicate: int = Field(1, ge=1)
    """Groups of ranks that each hold all weights; the ranks that no axis takes shard the weights of their group."""
    tp: int = Field(1, ge=1)
    """Ranks that divide each layer's matrices among them, for the same sequences."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward; False keeps them for the backward, for less traffic."""
    sync_every_microbatch: bool = False
    """Reduce gradients after each microbatch: more traffic, but no rank holds whole gradients until the last one."""
    lora: adapters.LoraSection | None = None
    """Train adapters alone; None trains the weights."""


class MeshEngine(TrainEngine):
    """A policy in parts on each rank, with its optimizer."""

    def __init__(self, config: MeshConfig, setting: EngineSetting, *, pp: int = 1, parts_per_rank: int = 1) -> None:
        """pp: ranks in a row through which a microbatch passes, `parts_per_rank` times."""
        super().__init__(config, setting)
        _refuse(config, setting)
        self._mesh_config = config
        axes = Axes.over(Ranks.world_size(), pp=pp, dp_replicate=config.dp_replicate, tp=config.tp)
        self._ranks = Ranks(setting.device, axes, needs_mesh=_compute_dtype(setting) != _stored_dtype(setting))
        self._described: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._head_only_norms: list[nn.Module] = []
        self._weights_in_forward: list[WeightsInForward] = []
        self._num_steps_done = 0
        stages = [self._ranks.index("pp") + pp * k for k in range(parts_per_rank)]
        try:
            self._parts = [self._build(stage, pp * parts_per_rank) for stage in stages]
        except BaseException:
            self._ranks.close()
            raise
        owned = self._ranks.gather([*dict(self._own_weights()), *self._own_buffers()], "pp")
        self._owner = {name: rank for rank, names in enumerate(owned) for name in names}
        self._tied_group = self._join_tied() if pp > 1 and self._parts[0].tied_name is not None else None
        self._optimizer = make_optimizer(self._parameters(), setting.optim)

    @property
    def data_place(self) -> tuple[int, int]:
        """See `TrainEngine.data_place`."""
        shards = self._ranks.size("dp_shard")
        place = self._ranks.index("dp_replicate") * shards + self._ranks.index("dp_shard")
        return place, self._ranks.size("dp_replicate") * shards

    @property
    def compute_dtype(self) -> torch.dtype:
        """What forward and backward compute in."""
        return _compute_dtype(self.setting)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between layers."""
        return int(self._parts[0].model.config.get_text_config().hidden_size)

    def optim_step(self) -> OptimStats:
        """See `TrainEngine.optim_step`."""
        optim = self.setting.optim
        lr = optim.lr * lr_factor(optim, self._num_steps_done, self.setting.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._complete_gradients()
        grad_norm = gradient_norm([weight for _, weight in self._own_weights()], self._ranks)
        is_skipped = not math.isfinite(grad_norm)
        if not is_skipped:
            if optim.max_grad_norm is not None and grad_norm > optim.max_grad_norm:
                scale_gradients(self._parameters(), optim.max_grad_norm / (grad_norm + 1e-6))
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_steps_done += 1
        return OptimStats(grad_norm, lr, is_skipped)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """See `TrainEngine.logprobs`."""
        _, pieces = self._agree(batch)
        with torch.no_grad():
            scores_T = join(batch, self._score(pieces))
        for part in self._parts:
            for module in fsdp_modules(part):
                module.reshard()  # what a backward would have done
        return self._shared_scores(scores_T)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """See `AdapterEngine.reference_logprobs`."""
        self._require_adapters("reference_logprobs")
        with adapters.without_adapters(self._parts):
            return self.logprobs(batch)

    def named_weights(self) -> Iterator[NamedTensor]:
        """See `TrainEngine.named_weights`; on a rank that does not hold a weight it arrives from the one that does."""
        shown = ((adapters.merged_name(name), name) for name in self._described)
        return self._export([(new, name) for new, name in shown if new is not None])

    def adapter_weights(self) -> Iterator[NamedTensor]:
        """See `AdapterEngine.adapter_weights`."""
        self._require_adapters("adapter_weights")
        shown = ((adapters.adapter_name(name), name) for name in self._described)
        return self._export([(new, name) for new, name in shown if new is not None])

    def offload(self, *parts: Part) -> None:
        """See `TrainEngine.offload`."""
        self._move(torch.device("cpu"), parts)

    def onload(self, *parts: Part) -> None:
        """See `TrainEngine.onload`."""
        self._move(self.setting.device.torch, parts)

    def save(self, path: Path) -> None:
        """See `TrainEngine.save`."""
        checkpoint.save(path, dict(self._own_weights()), self._optimizer, self._num_steps_done)

    def load(self, path: Path) -> None:
        """See `TrainEngine.load`."""
        weights = dict(self._own_weights()) | dict(self._tied_copy())
        self._num_steps_done = checkpoint.load(path, weights, self._optimizer)

    def close(self) -> None:
        """See `TrainEngine.close`."""
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        self._optimizer.param_groups.clear()
        for part in self._parts:
            release(part)
        self._ranks.close()

    @abstractmethod
    def _score(self, pieces: Microbatches) -> Iterable[tuple[Microbatch, Tensor]]:
        """[T] log-probs of each piece, without gradient; nothing on a rank that does not come to know them."""

    def _shared_scores(self, scores_T: Tensor) -> Tensor:
        """The scores on every rank that holds these sequences."""
        return scores_T

    def _over_data_ranks(self, values: list[int], op: Literal["sum", "max"]) -> list[int]:
        how = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return self._ranks.total(values, "dp_replicate", "dp_shard", op=how)

    def _build(self, stage: int, num_stages: int) -> Policy:
        """One part of the model, divided and sharded."""
        config, setting = self._mesh_config, self.setting
        axes, stored, compute = self._ranks.axes, _stored_dtype(setting), self.compute_dtype
        is_sharded = axes.dp_replicate * axes.dp_shard > 1 or stored != compute
        model = build_model(setting.model, dtype=_loaded_dtype(setting) if is_sharded else stored, seed=setting.seed)
        if setting.answer == "value":
            give_value_head(model)
        if config.lora is not None:
            adapters.inject(model, config.lora, setting.seed)
            # A value head that stays at its zeros would teach the adapters nothing.
            model.get_output_embeddings().requires_grad_(setting.answer == "value")
        self._described = {name: (item.shape, stored) for name, item in model.named_parameters()}
        self._described |= {name: (item.shape, item.dtype) for name, item in stored_buffers(model).items()}
        span = spans(len(decoder_layers(model)), num_stages)[stage]
        kind = Critic if setting.answer == "value" else Policy
        policy = kind(model.train(), shares_prompts=config.share_prompts, span=span)
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        if config.tp > 1:
            assert self._ranks.mesh is not None, axes
            self._head_only_norms += parallelize(model, self._ranks.mesh["tp"])
        return self._shard(policy) if is_sharded else policy.to(setting.device.torch)

    def _shard(self, policy: Policy) -> Policy:
        """The policy's weights over the ranks of its stage, in the dtype that they are stored in."""
        mesh, axes = self._ranks.mesh, self._ranks.axes
        assert mesh is not None, axes
        over = mesh["dp_shard"] if axes.dp_replicate == 1 else mesh["dp_replicate", "dp_shard"]
        # Without shards to gather, a layer's weights are only cast: once for forward and backward is enough.
        reshard = self._mesh_config.reshard_after_forward and axes.dp_shard > 1
        shard(policy, _present_layers(policy.model), over, self.compute_dtype, reshard=reshard)
        return policy.to(_stored_dtype(self.setting))

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self._parts for parameter in part.parameters()]

    def _own_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's weights under their own names, each weight of the model on the ranks of one stage alone."""
        copies = {id(weight) for _, weight in self._tied_copy()}
        for part in self._parts:
            yield from ((name, item) for name, item in part.model.named_parameters() if id(item) not in copies)

    def _own_buffers(self) -> dict[str, Tensor]:
        """What this rank's part of a checkpoint holds beside weights, such as the corrections of a router."""
        return {name: item for part in self._parts for name, item in stored_buffers(part.model).items()}

    def _tied_copy(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The head of a last stage whose embedding, the same weight, is on the first; under the embedding's name."""
        for part in self._parts:
            if part.tied_name is not None and part.span.is_last and not part.span.is_first:
                yield part.tied_name, part.model.get_output_embeddings().weight

    def _join_tied(self) -> dist.ProcessGroup | None:
        """The group of the first and the last stage's rank of each pipeline; None on the others."""
        assert self._ranks.mesh is not None, self._ranks.axes
        pipelines = self._ranks.mesh.mesh.flatten(1).T.tolist()
        groups = {tuple(ranks): dist.new_group([ranks[0], ranks[-1]]) for ranks in pipelines}
        ends = [group for ranks, group in groups.items() if dist.get_rank() in (ranks[0], ranks[-1])]
        return ends[0] if ends else None

    def _complete_gradients(self) -> None:
        """Sum what each rank has only a part of."""
        parts = local_gradients(item for module in self._head_only_norms for item in module.parameters())
        if parts:
            flat = self._ranks.reduce(torch.cat([part.flatten() for part in parts]), "tp")
            for part, whole in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(whole.view_as(part))
        if self._tied_group is not None:
            first = [part.model.get_input_embeddings().weight for part in self._parts if part.span.is_first]
            for gradient in local_gradients([*first, *(weight for _, weight in self._tied_copy())]):
                dist.all_reduce(gradient, group=self._tied_group)

    def _export(self, names: list[tuple[str, str]]) -> Iterator[NamedTensor]:
        """(new name, own name) of each: one at a time, whole, on every rank."""
        own: dict[str, Tensor] = {**dict(self._own_weights()), **self._own_buffers()}
        place = self._ranks.index("pp")
        for new, name in names:
            shape, dtype = self._described[name]
            if self._owner[name] == place:
                tensor = self._whole(own, name)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.setting.device.torch)
            yield new, self._ranks.share(tensor, "pp", self._owner[name])

    @torch.no_grad()
    def _whole(self, own: dict[str, Tensor], name: str) -> Tensor:
        """A weight gathered, with the adapter that it may have."""
        device = self.setting.device.torch
        weight = gathered(own[name], device)
        module = name.removesuffix(".base_layer.weight")
        if module == name:
            return weight
        first, second = (gathered(own[f"{module}.lora_{letter}.default.weight"], device) for letter in "AB")
        assert self._mesh_config.lora is not None, name
        return adapters.merged(weight, first, second, self._mesh_config.lora)

    def _require_adapters(self, where: str) -> None:
        if self._mesh_config.lora is None:
            raise EngineError(problem(where, None, "this engine trains no adapters", "Give the recipe [engine.lora]"))

    def _move(self, device: torch.device, parts: Iterable[Part]) -> None:
        if "weights" in parts:
            for part in self._parts:
                part.to(device)
        if "optimizer" in parts:
            for state in self._optimizer.state.values():
                state.update({key: value.to(device) for key, value in state.items() if value.dim() > 0})

    def _sync_gradients(self, part: Policy, *, is_last: bool) -> None:
        """Before a backward: whether its gradients are reduced over the ranks, and gathered weights are freed."""
        is_divided = self._ranks.size("dp_shard") > 1
        for module in fsdp_modules(part):
            module.set_requires_gradient_sync(is_last or self._mesh_config.sync_every_microbatch, recurse=False)
            module.set_reshard_after_backward(is_last or is_divided, recurse=False)

    @contextlib.contextmanager
    def _watching_weights(self) -> Iterator[None]:
        """Inside, until the first check has passed, `_weights_in_forward` knows the weights of each part."""
        if not self._has_checked_reach:
            self._weights_in_forward = [WeightsInForward(part) for part in self._parts]
        try:
            yield
        finally:
            for watch in self._weights_in_forward:
                watch.close()
            self._weights_in_forward = []


def _stored_dtype(setting: EngineSetting) -> torch.dtype:
    return torch_dtype(setting.model.dtype)


def _loaded_dtype(setting: EngineSetting) -> torch.dtype:
    """What weights that are to be sharded are read in.

    In a checkpoint's own dtype they are pages of its file, and each rank makes only its shard wider; made wider at
    once, every rank of a machine would hold the whole model. Only a wider dtype leaves computed buffers as they are.
    """
    stored = _stored_dtype(setting)
    if setting.model.path is None or stored != torch.float32:
        return stored
    dtype = load_config(setting.model).get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else stored


def _compute_dtype(setting: EngineSetting) -> torch.dtype:
    return torch_dtype(setting.model.compute_dtype or setting.model.dtype)


def _present_layers(model: PreTrainedModel) -> list[nn.Module]:
    return [layer for layer in decoder_layers(model) if not isinstance(layer, Inlet)]


def _refuse(config: MeshConfig, setting: EngineSetting) -> None:
    problems = []
    if torch.float16 in (_stored_dtype(setting), _compute_dtype(setting)):
        rule = "gradients below 6e-8 would vanish, as nothing scales the loss"
        problems.append(problem("model.compute_dtype", "float16", rule, "Use bfloat16"))
    if config.lora is not None and config.tp > 1:
        rule = "adapters are not divided over tensor-parallel ranks"
        problems.append(problem("engine.tp", config.tp, rule, "Set engine.tp = 1, or train without engine.lora"))
    if problems:
        raise ConfigError(problems)
