"""A backend without a model, for tests: the same contract, and answers that are drawn from a hash or written down."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ebbtide.models.support import context_tokens
from ebbtide.rollout.base import RolloutConfig, RolloutSetting, RolloutState
from ebbtide.rollout.requests import check_requests
from ebbtide.rollout.sampling import streams, uniform
from ebbtide.rollout.states import Gate
from ebbtide.rollout.table import RequestTable
from ebbtide.types import Completion, GenerateRequest
from ebbtide.weightsync.base import NamedTensor, WeightReceiver

__all__ = ["FakeRollout"]

Script = Callable[[GenerateRequest], Sequence[int]]
"""The token ids that answer a request; when they run out, an end token follows."""


class FakeRollout:
    """Draws from `logits`, or follows a script, under every rule of the contract.

    States, pauses, versions, sampling parameters and stop reasons are those of a real backend; pushed weights are
    looked at and not kept. A scripted token is certain, so its log-prob is 0.

    Attributes:
        pushes: of each complete push its version and the names that came.

    Example:
        >>> rollout = FakeRollout(FakeRollout.Config(), setting, script=lambda request: [5, 6])  # doctest: +SKIP
    """

    class Config(RolloutConfig):
        """`[rollout] type = "fake"`."""

        type: str = "fake"
        spread: float = Field(3.0, ge=0)
        """Distance of the largest logit to the smallest; 0 makes all tokens equally likely."""

    def __init__(self, config: "FakeRollout.Config", setting: RolloutSetting, script: Script | None = None) -> None:
        self._config = config
        self._setting = setting
        self._script = script
        self._context_tokens = context_tokens(setting.model_config)
        self._vocab_size = int(setting.model_config.get_text_config().vocab_size)
        self._gate = Gate()
        self.pushes: list[tuple[int, tuple[str, ...]]] = []

    @property
    def state(self) -> RolloutState:
        """Where the backend stands."""
        return self._gate.state

    def logits(self, newest: Tensor, positions: Tensor, version: int) -> Tensor:
        """[B, V] float32 of the token after `newest` [B] at `positions` [B]: a hash of both and of the version."""
        seeds = streams(newest * 1_000_003 + positions * 7919 + version)
        return uniform(seeds[:, None], torch.arange(self._vocab_size)).float() * self._config.spread

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """See `RolloutBackend.generate`."""
        with self._gate.generating():
            check_requests(
                requests,
                context_tokens=self._context_tokens,
                vocab_size=self._vocab_size,
                has_tokenizer=self._setting.decode is not None,
            )
            eos_ids, decode = self._setting.eos_ids, self._setting.decode
            table = RequestTable(requests, self._context_tokens, eos_ids, decode, torch.device("cpu"))
            unfinished = list(range(len(requests)))
            while unfinished:
                version = await self._gate.turn()
                ended = table.draw(unfinished, self._next_logits(table, unfinished, version), version)
                unfinished = [n for n in unfinished if n not in ended]
                for completion in table.completions(ended):
                    yield completion

    async def pause(self) -> None:
        """See `RolloutBackend.pause`."""
        self._gate.pause()

    async def resume(self) -> None:
        """See `RolloutBackend.resume`."""
        self._gate.resume()

    async def receive_weights(self, version: int, source: WeightReceiver) -> None:
        """See `RolloutBackend.receive_weights`."""
        names: list[str] = []

        def load(weights: Sequence[NamedTensor]) -> None:
            names.extend(name for name, _ in weights)

        with self._gate.receiving(version):
            await source.receive(load, version)
        self.pushes.append((version, tuple(names)))

    async def sleep(self, level: Literal[1, 2]) -> None:
        """See `RolloutBackend.sleep`."""
        self._gate.sleep(level)

    async def wake(self, what: Literal["weights", "cache", "all"] = "all") -> None:
        """See `RolloutBackend.wake`."""
        self._gate.wake(what)

    async def close(self) -> None:
        """See `RolloutBackend.close`."""
        self._gate.close()

    def _next_logits(self, table: RequestTable, numbers: Sequence[int], version: int) -> Tensor:
        prompts = [table.prompt(n) for n in numbers]
        newest = torch.stack([prompt[-1] for prompt in prompts])
        logits = self.logits(newest, torch.tensor([len(prompt) - 1 for prompt in prompts]), version)
        if self._script is None:
            return logits
        certain = torch.full_like(logits, float("-inf"))
        for row, n in enumerate(numbers):
            answer, num_drawn = self._script(table.requests[n]), int(table.num_drawn[n])
            end = self._setting.eos_ids[0] if self._setting.eos_ids else 0
            certain[row, answer[num_drawn] if num_drawn < len(answer) else end] = 0.0
        return certain
