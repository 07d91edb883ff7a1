"""Continuous batching on a transformers model: requests join by prefill, step together, and leave when they are done.

Only arithmetic is here; states, pauses and weights are the backend's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.errors import ModelError, problem
from ebbtide.models.cache import DecodeAttention, KeyValueCache, PrefillAttention
from ebbtide.models.head import logits_of
from ebbtide.rollout.table import RequestTable
from ebbtide.types import Completion, GenerateRequest

__all__ = ["Decoder", "Limits"]

_FIRST_TOKENS = 64  # room for new tokens that a cache begins with; it grows by half


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a decoder.

    Attributes:
        max_concurrent: requests that decode together at most.
        max_prefill_tokens: prompt tokens that one step computes at most, unless a single prompt is longer.
        context_tokens: longest prompt and completion together.
        eos_ids: tokens that end a completion.
    """

    max_concurrent: int
    max_prefill_tokens: int
    context_tokens: int
    eos_ids: tuple[int, ...]


class Decoder:
    """The requests of one `generate` call.

    `step()` advances the running ones by one token and returns those that ended. The running requests are the rows
    0, 1, ... of the cache; where one ends, the last takes its place.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[GenerateRequest],
        limits: Limits,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """decode: token ids to text; needed only by requests with stop strings."""
        self._model = model
        self._limits = limits
        self._device = model.get_output_embeddings().weight.device
        self._num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._table = RequestTable(requests, limits.context_tokens, limits.eos_ids, decode, self._device)
        self._waiting = deque(range(len(requests)))
        self._running: list[int] = []  # numbers of requests, in the order of their cache rows
        self._cache: KeyValueCache | None = None
        # Requests with the same number have equal prompts and equal tokens so far.
        self._history = np.zeros(len(requests), dtype=np.int64)
        self._num_histories = 0

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return not self._running and not self._waiting

    def release(self) -> None:
        """Drop everything computed from the weights; what was running is prefilled again, tokens so far included."""
        self._waiting.extendleft(reversed(self._running))
        self._running, self._cache = [], None

    @torch.inference_mode()
    def step(self, version: int) -> list[Completion]:
        """One token for every running request, or the first one for newcomers, drawn under weights of `version`.

        Newcomers wait until a quarter of the places is free, so that prefills are few and large.

        Raises:
            RolloutError: the logits are not finite.
        """
        num_places = min(self._limits.max_concurrent, len(self._table.requests))
        num_free = num_places - len(self._running)
        if self._waiting and 4 * num_free >= min(num_places, 4 * len(self._waiting)):
            return self._admit(num_free, num_places, version)
        assert self._running, "nothing left to do"
        return self._advance(version)

    def _admit(self, num_free: int, num_places: int, version: int) -> list[Completion]:
        """Prefill the next requests into free rows and draw their first token."""
        newcomers, prompts, owners = self._next(num_free)
        longest = max(len(prompt) for prompt in prompts)
        if self._cache is None:
            self._cache = KeyValueCache(num_places, longest + min(_FIRST_TOKENS, self._table.most_left))
        self._cache.reserve(longest + 1)
        lengths = [len(prompt) for prompt in prompts]
        plan = PrefillAttention(self._cache, lengths, owners, first_row=len(self._running))
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self._device)
        hidden = self._hidden(torch.cat(prompts).to(self._device), positions, plan)
        last = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        logits = logits_of(self._model, hidden.index_select(0, last))
        if len(prompts) < len(owners):
            logits = logits.index_select(0, torch.tensor(owners, device=self._device))
        first_row = len(self._running)
        self._running += newcomers
        self._history[newcomers] = self._num_histories + np.array(owners)
        self._num_histories += len(prompts)
        return self._draw(first_row, logits, version)

    def _next(self, num_free: int) -> tuple[list[int], list[Tensor], list[int]]:
        """Requests to admit, what to prefill for them, and which of that is whose.

        Requests that share the prompt's tensor, and have drawn nothing yet, share its prefill.
        """
        known: dict[tuple[int, int | None], int] = {}
        newcomers: list[int] = []
        prompts: list[Tensor] = []
        owners: list[int] = []
        num_tokens = 0
        while self._waiting and len(newcomers) < num_free:
            n = self._waiting[0]
            key = (id(self._table.requests[n].prompt_ids), n if self._table.num_drawn[n] else None)
            if key not in known:
                prompt = self._table.prompt(n)
                num_tokens += len(prompt)
                if newcomers and num_tokens > self._limits.max_prefill_tokens:
                    break
                known[key] = len(prompts)
                prompts.append(prompt)
            owners.append(known[key])
            newcomers.append(self._waiting.popleft())
        return newcomers, prompts, owners

    def _advance(self, version: int) -> list[Completion]:
        assert self._cache is not None, self._running
        newest, positions = self._table.newest(self._running)
        self._cache.reserve(int(positions.max()) + 1)
        twins = self._twins()
        plan = DecodeAttention(self._cache, positions, twins)
        if twins is not None:
            newest, positions = (part.index_select(0, twins[0].cpu()) for part in (newest, positions))
        hidden = self._hidden(newest.to(self._device), positions.to(self._device), plan)
        logits = logits_of(self._model, hidden)
        return self._draw(0, logits if twins is None else logits.index_select(0, twins[1]), version)

    def _twins(self) -> tuple[Tensor, Tensor] | None:
        """A row for each distinct history, and which of them each row has; None unless a quarter falls away."""
        histories = self._history[self._running]
        _, first, number = np.unique(histories, return_index=True, return_inverse=True)
        if 4 * len(first) > 3 * len(histories):
            return None
        return torch.from_numpy(first).to(self._device), torch.from_numpy(number).to(self._device)

    def _hidden(self, tokens: Tensor, positions: Tensor, plan: PrefillAttention | DecodeAttention) -> Tensor:
        backbone = self._model.get_decoder()
        output = backbone(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan)
        if plan.calls != self._num_layers:
            rule = f"{plan.calls} of {self._num_layers} layers attended through the plan"
            raise ModelError(problem("model", self._model.config.model_type, rule, "Choose another model"))
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def _draw(self, first_row: int, logits: Tensor, version: int) -> list[Completion]:
        """Append one token to each row from `first_row` on, and take out those that ended."""
        drawing = self._running[first_row:]
        ended = self._table.draw(drawing, logits, version)
        newest, _ = self._table.newest(drawing)
        pairs = self._history[drawing] * logits.shape[-1] + newest.numpy()
        distinct, number = np.unique(pairs, return_inverse=True)
        self._history[drawing] = self._num_histories + number
        self._num_histories += len(distinct)
        if not ended:
            return []
        self._take_out([row for row, n in enumerate(self._running) if n in ended])
        return self._table.completions(ended)

    def _take_out(self, rows: list[int]) -> None:
        """The last rows move into the places that become free."""
        num_left = len(self._running) - len(rows)
        movers = sorted(set(range(num_left, len(self._running))) - set(rows))
        holes = [row for row in rows if row < num_left]
        assert self._cache is not None, rows
        self._cache.move(movers, holes)
        for mover, hole in zip(movers, holes, strict=True):
            self._running[hole] = self._running[mover]
        del self._running[num_left:]
