"""FSDP2 over a device mesh; on one device nothing is sharded and the same code runs without a process group."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ebbtide.algorithms.base import Needs
from ebbtide.data.microbatch import Microbatch
from ebbtide.engines.base import EngineConfig, EngineSetting, Finish, OptimStats, Part, TrainEngine
from ebbtide.engines.mesh import Axes, Ranks
from ebbtide.engines.optim import clip_gradients, lr_factor, make_optimizer
from ebbtide.engines.sharding import WeightsInForward, decoder_layers, fsdp_modules, gathered, shard
from ebbtide.models.build import build_model, torch_dtype
from ebbtide.models.policy import Policy, batch_logprobs
from ebbtide.numerics.logprobs import TokenStats
from ebbtide.types import TrainBatch
from ebbtide.weightsync.base import NamedTensor

__all__ = ["FSDPEngine"]


class FSDPEngine(TrainEngine):
    """A policy and its optimizer."""

    class Config(EngineConfig):
        """`[engine] type = "fsdp"`."""

        type: str = "fsdp"
        activation_checkpointing: bool = False
        """Keep only each layer's input for the backward, and compute the layer again there."""

    def __init__(self, config: "FSDPEngine.Config", setting: EngineSetting) -> None:
        super().__init__(config, setting)
        stored = torch_dtype(setting.model.dtype)
        compute = torch_dtype(setting.model.compute_dtype or setting.model.dtype)
        axes = Axes.over(Ranks.world_size())
        self._ranks = Ranks(setting.device, axes, needs_mesh=stored != compute)
        model = build_model(setting.model, dtype=stored, seed=setting.seed)
        model.to(setting.device.torch).train()
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._policy = Policy(model, shares_prompts=config.share_prompts)
        if self._ranks.mesh is not None:
            # Without shards to gather, a layer's weights are only cast: once a microbatch is enough.
            shard(
                self._policy,
                list(decoder_layers(model)),
                self._ranks.mesh["dp_shard"],
                compute,
                reshard=axes.dp_shard > 1,
            )
        self._weights_in_forward: WeightsInForward | None = None
        self._optimizer = make_optimizer(self._policy.named_parameters(), setting.optim)
        self._num_steps_done = 0

    def _run_microbatches(self, microbatches: Iterable[Microbatch], finish: Finish, needs: Needs) -> None:
        if not self._has_checked_reach:
            self._weights_in_forward = WeightsInForward(self._policy)
        try:
            for microbatch in microbatches:
                finish(microbatch, self._forward(microbatch.batch, needs)).backward()
        finally:
            if self._weights_in_forward is not None:
                self._weights_in_forward.close()
                self._weights_in_forward = None

    def _forward(self, batch: TrainBatch, needs: Needs) -> TokenStats:
        stats: TokenStats = self._policy(
            batch, temperature=self.setting.temperature, want_entropy=Needs.ENTROPY in needs
        )
        return stats

    def optim_step(self) -> OptimStats:
        """See `TrainEngine.optim_step`."""
        lr = self.setting.optim.lr * lr_factor(self.setting.optim, self._num_steps_done, self.setting.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        grad_norm = float(clip_gradients(self._policy.parameters(), self.setting.optim.max_grad_norm))
        is_skipped = not math.isfinite(grad_norm)
        if not is_skipped:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_steps_done += 1
        return OptimStats(grad_norm, lr, is_skipped)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """See `TrainEngine.logprobs`."""
        setting, max_tokens = self.setting, self._config.max_tokens_per_microbatch
        logprobs_T = batch_logprobs(self._policy, batch, setting.temperature, max_tokens, setting.device)
        for module in fsdp_modules(self._policy):
            module.reshard()  # what a backward would have done
        return logprobs_T

    def named_weights(self) -> Iterator[NamedTensor]:
        """See `TrainEngine.named_weights`."""
        for name, parameter in self._policy.model.named_parameters():
            yield name, gathered(parameter, self.setting.device.torch)

    def offload(self, *parts: Part) -> None:
        """See `TrainEngine.offload`."""
        self._move(torch.device("cpu"), parts)

    def onload(self, *parts: Part) -> None:
        """See `TrainEngine.onload`."""
        self._move(self.setting.device.torch, parts)

    def save(self, path: Path) -> None:
        """See `TrainEngine.save`."""
        weights, optimizer = get_state_dict(self._policy, self._optimizer)
        state = {"weights": weights, "optimizer": optimizer, "num_steps_done": self._num_steps_done}
        with _single_process_is_meant():
            dcp.save(state, checkpoint_id=path, no_dist=not dist.is_initialized())

    def load(self, path: Path) -> None:
        """See `TrainEngine.load`."""
        weights, optimizer = get_state_dict(self._policy, self._optimizer)
        state: dict[str, Any] = {"weights": weights, "optimizer": optimizer, "num_steps_done": 0}
        with _single_process_is_meant():
            dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        set_state_dict(
            self._policy,
            self._optimizer,
            model_state_dict=state["weights"],
            optim_state_dict=state["optimizer"],
        )
        self._num_steps_done = state["num_steps_done"]

    def close(self) -> None:
        """See `TrainEngine.close`."""
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        self._policy.to("meta")
        self._ranks.close()

    def _trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        assert self._weights_in_forward is not None, "only inside forward_backward"
        weights = self._weights_in_forward.by_name.items()
        return ((name.removeprefix("model."), item) for name, item in weights if item.requires_grad)

    def _move(self, device: torch.device, parts: Sequence[Part]) -> None:
        if "weights" in parts:
            self._policy.to(device)
        if "optimizer" in parts:
            for state in self._optimizer.state.values():
                state.update({key: value.to(device) for key, value in state.items() if value.dim() > 0})


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Torch warns that without a process group a checkpoint is one process's, which is what one device wants."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
