"""Generation in this process on a transformers model, which may share the engine's weights."""

from collections.abc import AsyncIterator, Sequence
from typing import Literal

import torch
from pydantic import Field

from ebbtide.models.support import context_tokens
from ebbtide.rollout.base import RolloutConfig, RolloutSetting, RolloutState, SharesTensors
from ebbtide.rollout.decoding import Decoder, Limits
from ebbtide.rollout.requests import check_requests
from ebbtide.rollout.states import Gate
from ebbtide.rollout.weights import LoadedModel
from ebbtide.types import Completion, GenerateRequest
from ebbtide.weightsync.base import WeightReceiver

__all__ = ["InProcessRollout"]


class InProcessRollout:
    """A model of its own structure whose weights come by push.

    Where the transport hands over the engine's own tensors, device and dtype are the same and `share_weights` is on, it
    keeps them, so the policy exists once in memory; else it copies. A sharing backend sees the engine's updates at
    once, so it must not generate while the engine steps: the loop pushes after every update, and the push makes the
    version official.
    """

    class Config(RolloutConfig):
        """`[rollout] type = "inprocess"`."""

        type: str = "inprocess"
        max_concurrent: int = Field(256, ge=1)
        """Completions that decode together at most."""
        max_prefill_tokens: int = Field(4096, ge=1)
        """Prompt tokens computed at one time at most, unless one prompt is longer; a pause waits for no more."""
        share_weights: bool = True
        """Keep the engine's own tensors where dtype and device allow; False always copies."""

    def __init__(self, config: "InProcessRollout.Config", setting: RolloutSetting) -> None:
        self._config = config
        self._setting = setting
        self._limits = Limits(
            config.max_concurrent, config.max_prefill_tokens, context_tokens(setting.model_config), setting.eos_ids
        )
        self._weights = LoadedModel(setting.model_config, setting.dtype, setting.device.torch)
        self._gate = Gate()
        self._decoders: list[Decoder] = []

    @property
    def state(self) -> RolloutState:
        """Where the backend stands."""
        return self._gate.state

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """See `RolloutBackend.generate`."""
        with self._gate.generating():
            check_requests(
                requests,
                context_tokens=self._limits.context_tokens,
                vocab_size=self._setting.model_config.get_text_config().vocab_size,
                has_tokenizer=self._setting.decode is not None,
            )
            decoder = Decoder(self._weights.model, requests, self._limits, self._setting.decode)
            self._decoders.append(decoder)
            try:
                while not decoder.is_done:
                    for completion in decoder.step(await self._gate.turn()):
                        yield completion
            finally:
                self._decoders.remove(decoder)

    async def pause(self) -> None:
        """See `RolloutBackend.pause`; takes effect within one token."""
        self._gate.pause()

    async def resume(self) -> None:
        """See `RolloutBackend.resume`."""
        self._gate.resume()

    async def receive_weights(self, version: int, source: WeightReceiver) -> None:
        """See `RolloutBackend.receive_weights`."""
        may_share = self._config.share_weights and isinstance(source, SharesTensors)
        with self._gate.receiving(version):
            self._release_caches()
            self._weights.begin()
            await source.receive(lambda weights: self._weights.load(weights, may_share=may_share), version)
            self._weights.finish(version)

    async def sleep(self, level: Literal[1, 2]) -> None:
        """See `RolloutBackend.sleep`; on level 1 copied weights wait on the host, and shared ones are the engine's."""
        self._gate.sleep(level)
        self._release_caches()
        if level == 2:
            self._weights.drop()
        else:
            self._weights.move_owned(torch.device("cpu"))
        self._setting.device.empty_cache()

    async def wake(self, what: Literal["weights", "cache", "all"] = "all") -> None:
        """See `RolloutBackend.wake`; the cache is made when requests come."""
        if what != "cache":
            self._weights.move_owned(self._setting.device.torch)
        self._gate.wake(what)

    async def close(self) -> None:
        """See `RolloutBackend.close`."""
        if self._gate.close():
            self._release_caches()
            self._weights.drop()

    def _release_caches(self) -> None:
        for decoder in self._decoders:
            decoder.release()
