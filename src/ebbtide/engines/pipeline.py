"""1F1B over stages cut by layers, each stage sharded and tensor-parallel like the engine `fsdp`.

A microbatch's activations arrive in a buffer made for it and are dropped with its graph, so that what a rank holds
depends on the pipeline's depth and never on the number of microbatches; every microbatch may have another length.
The last stage computes the loss; its sealed outputs then go to all ranks of the pipeline.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from ebbtide.algorithms.base import Needs
from ebbtide.data.microbatch import Microbatch, Microbatches, spread
from ebbtide.engines.base import EngineSetting, Finish, MicrobatchOutput
from ebbtide.engines.links import Links
from ebbtide.engines.mesh_engine import MeshConfig, MeshEngine
from ebbtide.engines.outputs import decode, encode
from ebbtide.engines.schedule import Action, Schedule, forward_only, one_f_one_b
from ebbtide.errors import ConfigError, problem
from ebbtide.models.policy import Layout
from ebbtide.numerics.logprobs import TokenStats

__all__ = ["PipelineEngine"]


class PipelineEngine(MeshEngine):
    """Some layers of the model on each rank, or in turns on each."""

    class Config(MeshConfig):
        """`[engine] type = "pipeline"`."""

        type: str = "pipeline"
        pp: int = Field(2, ge=1)
        """Ranks that a microbatch passes through."""
        stages_per_rank: int = Field(1, ge=1)
        """More than one interleaves: shorter stages, less idle time, more messages."""

    def __init__(self, config: "PipelineEngine.Config", setting: EngineSetting) -> None:
        if config.pp == 1 and config.stages_per_rank > 1:
            rule = "has no effect on one rank"
            raise ConfigError(problem("engine.stages_per_rank", config.stages_per_rank, rule, "Raise engine.pp"))
        super().__init__(config, setting, pp=config.pp, parts_per_rank=config.stages_per_rank)
        self._pp, self._stages_per_rank = config.pp, config.stages_per_rank
        self._links = Links(self._ranks, config.pp * config.stages_per_rank) if config.pp > 1 else None

    def _run_microbatches(self, microbatches: Microbatches, finish: Finish, needs: Needs) -> None:
        schedule = one_f_one_b(self._pp, self._stages_per_rank, len(microbatches))
        with self._watching_weights():
            _Pass(self, schedule, microbatches, Needs.ENTROPY in needs).train(finish)
        if not any(part.span.is_last for part in self._parts):
            self._has_checked_reach = True

    def _score(self, pieces: Microbatches) -> Iterator[tuple[Microbatch, Tensor]]:
        schedule = forward_only(self._pp, self._stages_per_rank, len(pieces))
        return _Pass(self, schedule, pieces, want_entropy=False).score()

    def _shared(self, outputs: list[MicrobatchOutput]) -> list[MicrobatchOutput]:
        is_last, device = self._ranks.index("pp") == self._pp - 1, self.setting.device.torch
        data = torch.frombuffer(bytearray(encode(outputs)), dtype=torch.uint8).to(device)
        (num_bytes,) = self._ranks.share(torch.tensor([data.numel()], device=device), "pp", self._pp - 1).tolist()
        data = data if is_last else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._ranks.share(data, "pp", self._pp - 1)
        return outputs if is_last else decode(data.cpu().numpy().tobytes(), device)

    def _shared_scores(self, scores_T: Tensor) -> Tensor:
        return self._ranks.share(scores_T.to(self.setting.device.torch), "pp", self._pp - 1).cpu()

    def _trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the part that computes the loss, which is a rank's last; the others' outputs are checked one by one."""
        return self._weights_in_forward[-1].trained()


@dataclass(frozen=True, slots=True)
class _Held:
    """What a backward needs of its forward."""

    received: Tensor | None
    result: Tensor


class _Pass:
    """One pass of a batch through the pipeline, as this rank sees it."""

    def __init__(self, engine: PipelineEngine, schedule: Schedule, pieces: Microbatches, want_entropy: bool) -> None:
        self._engine = engine
        self._schedule = schedule
        self._pieces = pieces
        self._want_entropy = want_entropy
        place = engine._ranks.index("pp")
        self._actions = schedule.actions[place]
        self._settled = schedule.settled[place]
        self._layouts: dict[Action, Layout] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._unchecked = set() if engine._has_checked_reach else set(range(len(engine._parts)))

    def train(self, finish: Finish) -> None:
        """Forward, loss and backward of all microbatches."""
        for index, action in enumerate(self._actions):
            self._expect_next(index)
            if action.kind == "backward":
                self._backward(index, action)
                continue
            received, result = self._forward(index, action)
            part = action.stage // self._engine._pp
            if isinstance(result, Tensor):
                self._check(part, result, action)
                self._send(action, result)
            else:
                result = finish(self._pieces[action.microbatch], result)
            self._held[action.stage, action.microbatch] = _Held(received, result)
            del received, result
        self._finish()

    def score(self) -> Iterator[tuple[Microbatch, Tensor]]:
        """[T] log-probs of each microbatch, on the last stage."""
        for index, action in enumerate(self._actions):
            self._expect_next(index)
            _, result = self._forward(index, action)
            if isinstance(result, Tensor):
                self._send(action, result)
            else:
                microbatch = self._pieces[action.microbatch]
                yield microbatch, spread(result.logprobs, microbatch.batch.loss_mask)
        self._finish()

    def _forward(self, index: int, action: Action) -> tuple[Tensor | None, Tensor | TokenStats]:
        """The input received, and what the stage makes of it."""
        layout = self._layout(action)
        del self._layouts[action]
        received = self._take(index, action)
        if received is not None:
            received.requires_grad_(torch.is_grad_enabled())
        part = self._engine._parts[action.stage // self._engine._pp]
        temperature = self._engine.setting.temperature
        return received, part(layout, received, temperature=temperature, want_entropy=self._want_entropy)

    def _backward(self, index: int, action: Action) -> None:
        held = self._held.pop((action.stage, action.microbatch))
        gradient = self._take(index, action)
        part = self._engine._parts[action.stage // self._engine._pp]
        self._engine._sync_gradients(part, is_last=action.microbatch == len(self._pieces) - 1)
        if held.result.requires_grad:  # nothing to do for a first stage that is frozen
            torch.autograd.backward(held.result, gradient)
        if held.received is not None:
            assert held.received.grad is not None, action
            self._send(action, held.received.grad)

    def _check(self, part: int, result: Tensor, action: Action) -> None:
        """Once: a stage's output must reach its weights, as a loss must."""
        if part in self._unchecked:
            self._unchecked.remove(part)
            weights = self._engine._weights_in_forward[part].trained()
            self._engine._check_reach(result, f"stages[{action.stage}].output", weights)

    def _layout(self, action: Action) -> Layout:
        if action not in self._layouts:
            part = self._engine._parts[action.stage // self._engine._pp]
            self._layouts[action] = part.layout(self._pieces[action.microbatch].batch)
        return self._layouts[action]

    def _expect_next(self, index: int) -> None:
        """Ask for the messages that this action and the next one need."""
        for action in self._actions[index : index + 2]:
            source, links = self._schedule.source(action), self._engine._links
            if source is None:
                continue
            held = self._held.get((action.stage, action.microbatch))
            if action.kind == "backward" and held is None:
                continue  # of the forward that comes first
            num_tokens = self._layout(action).tokens.shape[0] if held is None else held.result.shape[1]
            assert links is not None, action
            links.expect(source, (1, num_tokens, self._engine.hidden_size), self._engine.compute_dtype)

    def _take(self, index: int, action: Action) -> Tensor | None:
        """The message that the action needs; then lets go of those that it shows to have arrived."""
        source, links = self._schedule.source(action), self._engine._links
        if links is None:
            return None
        message = None if source is None else links.take(source)
        for earlier in self._settled[index]:
            links.settle(self._actions[earlier])
        return message

    def _send(self, action: Action, tensor: Tensor) -> None:
        target, links = self._schedule.target(action), self._engine._links
        assert target is not None, action
        assert links is not None, action
        links.send(action, tensor, target.stage)

    def _finish(self) -> None:
        if self._engine._links is not None:
            self._engine._links.finish()
