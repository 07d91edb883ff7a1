"""Generation in this process on a transformers model, which may share the engine's weights."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from ebbtide.errors import RolloutError, WeightSyncError, problem
from ebbtide.models.build import build_shell
from ebbtide.models.support import context_tokens
from ebbtide.rollout.base import Asleep, Awake, Loading, RolloutConfig, RolloutSetting, RolloutState, require_awake
from ebbtide.rollout.decoding import Decoder, Limits
from ebbtide.types import Completion, GenerateRequest
from ebbtide.weightsync.base import NamedTensor, WeightReceiver

__all__ = ["InProcessRollout"]


class InProcessRollout:
    """A model of its own structure whose weights come by push.

    Where device and dtype are the same and `share_weights` is on, it keeps the pushed tensors themselves, so the
    policy exists once in memory; else it copies. A sharing backend sees the engine's updates at once, so it must not
    generate while the engine steps: the loop pushes after every update, and the push makes the version official.
    """

    class Config(RolloutConfig):
        """`[rollout] type = "inprocess"`."""

        type: str = "inprocess"
        max_concurrent: int = Field(256, ge=1)
        """Completions that decode together at most."""
        share_weights: bool = True
        """Keep the engine's own tensors where dtype and device allow; False always copies."""

    def __init__(self, config: "InProcessRollout.Config", setting: RolloutSetting) -> None:
        self._config = config
        self._setting = setting
        self._limits = Limits(config.max_concurrent, context_tokens(setting.model_config), setting.eos_ids)
        self._model = build_shell(setting.model_config, dtype=setting.dtype)
        self._state: RolloutState = Loading(0)
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._num_generating = 0
        self._version_asleep = 0

    @property
    def state(self) -> RolloutState:
        """Where the backend stands."""
        return self._state

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """See `RolloutBackend.generate`."""
        require_awake(self._state)
        self._check(requests)
        pending = list(requests)
        self._num_generating += 1
        try:
            while pending:
                await self._may_run.wait()
                version = require_awake(self._state)
                decoder = Decoder(self._model, pending, self._limits, self._setting.decode)
                while not decoder.is_done and self._may_run.is_set():
                    for completion in decoder.step(version):
                        yield completion
                    await asyncio.sleep(0)  # a control call may come in here
                pending = decoder.interrupt()
        finally:
            self._num_generating -= 1

    async def pause(self) -> None:
        """See `RolloutBackend.pause`; takes effect within one token."""
        self._may_run.clear()

    async def resume(self) -> None:
        """See `RolloutBackend.resume`."""
        require_awake(self._state)
        self._may_run.set()

    async def receive_weights(self, version: int, source: WeightReceiver) -> None:
        """See `RolloutBackend.receive_weights`."""
        if isinstance(self._state, Asleep):
            raise RolloutError(
                problem("rollout.state", self._state, "a push to a sleeping backend would be lost", "Wake it")
            )
        if self._num_generating and self._may_run.is_set():
            rule = "weights cannot change under running requests"
            raise RolloutError(problem("rollout.generating", self._num_generating, rule, "Pause first"))
        self._state = Loading(version)
        missing = {name for name, _ in self._model.named_parameters()}
        await source.receive(lambda weights: self._load(weights, missing), version)
        if missing:
            rule = f"the push of version {version} lacked {len(missing)} weights"
            raise WeightSyncError(problem("rollout.weights", sorted(missing)[:3], rule, "Push all of named_weights()"))
        self._model.tie_weights()
        self._state = Awake(version)

    async def sleep(self, level: Literal[1, 2]) -> None:
        """See `RolloutBackend.sleep`; on level 1 the weights stay, since generation keeps no cache between calls."""
        if self._num_generating and self._may_run.is_set():
            rule = "a backend cannot sleep under running requests"
            raise RolloutError(problem("rollout.generating", self._num_generating, rule, "Pause first"))
        self._version_asleep = require_awake(self._state)
        if level == 2:
            for module, name, parameter in _parameters(self._model):
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
        self._state = Asleep(level)

    async def wake(self, what: Literal["weights", "cache", "all"] = "all") -> None:
        """See `RolloutBackend.wake`."""
        if isinstance(self._state, Asleep) and what != "cache":
            self._state = (Awake if self._state.level == 1 else Loading)(self._version_asleep)

    async def close(self) -> None:
        """See `RolloutBackend.close`."""
        self._may_run.set()
        self._model = self._model.to("meta")
        self._state = Asleep(2)

    def _check(self, requests: Sequence[GenerateRequest]) -> None:
        limit = self._limits.context_tokens
        for request in requests:
            P = len(request.prompt_ids)
            if not 0 < P < limit:
                rule = f"a prompt needs at least 1 token and must leave room in the context of {limit}"
                raise RolloutError(problem(f"requests[{request.request_id}].prompt_ids", P, rule, "Shorten the prompt"))
            if request.sampling.stop and self._setting.decode is None:
                raise RolloutError(problem("sampling.stop", request.sampling.stop, "stop strings need a tokenizer"))

    @torch.no_grad()
    def _load(self, weights: Sequence[NamedTensor], missing: set[str]) -> None:
        for name, tensor in weights:
            owner_name, _, leaf = name.rpartition(".")
            owner = self._model.get_submodule(owner_name)
            old = owner._parameters.get(leaf)
            if old is None or old.shape != tensor.shape:
                rule = f"the model has {'no such weight' if old is None else f'shape {tuple(old.shape)} there'}"
                raise WeightSyncError(problem(f"rollout.weights.{name}", tuple(tensor.shape), rule))
            device = self._setting.device.torch
            fits = tensor.dtype == self._setting.dtype and tensor.device == device
            if fits and self._config.share_weights:
                owner._parameters[leaf] = nn.Parameter(tensor.detach(), requires_grad=False)
            elif old.device == device and not self._config.share_weights:
                old.copy_(tensor)
            else:
                copy = torch.empty(tensor.shape, dtype=self._setting.dtype, device=device).copy_(tensor)
                owner._parameters[leaf] = nn.Parameter(copy, requires_grad=False)
            missing.discard(name)


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
