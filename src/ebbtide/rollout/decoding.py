"""Continuous batching on a transformers model: requests join by prefill, step together, and leave when they are done.

Only arithmetic is here; states, pauses and weights are the backend's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.models.cache import DecodeAttention, KeyValueCache, PrefillAttention
from ebbtide.models.head import head_options
from ebbtide.rollout.sampling import RowSampling
from ebbtide.types import Completion, GenerateRequest, StopReason

__all__ = ["Decoder", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a decoder.

    Attributes:
        max_concurrent: requests that decode together at most.
        context_tokens: longest prompt and completion together.
        eos_ids: tokens that end a completion.
    """

    max_concurrent: int
    context_tokens: int
    eos_ids: tuple[int, ...]


class Decoder:
    """The requests of one `generate` call, under one version of the weights.

    `step()` advances the running ones by one token and returns those that ended. `interrupt()` gives back the
    unfinished ones, each with what it has as its prefix, to be continued by another decoder.
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
        self._decode = decode
        self._device = model.get_output_embeddings().weight.device
        self._softcap, self._logit_scale = head_options(model)
        self._eos = torch.tensor(limits.eos_ids, device=self._device)
        self._waiting = list(reversed(requests))
        self._running: _Running | None = None

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return self._running is None and not self._waiting

    @torch.no_grad()
    def step(self, version: int) -> list[Completion]:
        """One token for every running request, drawn under weights of `version`.

        Newcomers wait until half the places are free, so that copying the cache for them stays rare.
        """
        num_running = 0 if self._running is None else len(self._running.requests)
        if self._waiting and 2 * num_running <= self._limits.max_concurrent:
            return self._admit(self._limits.max_concurrent - num_running, version)
        assert self._running is not None, "nothing left to do"
        return self._advance(self._running, version)

    def interrupt(self) -> list[GenerateRequest]:
        """Everything unfinished, in no particular order; this decoder is then done."""
        unfinished = list(reversed(self._waiting))
        if self._running is not None:
            unfinished += self._running.as_requests()
        self._running, self._waiting = None, []
        return unfinished

    def _admit(self, num_free: int, version: int) -> list[Completion]:
        """Prefill the next requests, draw their first token, and let them join those that run."""
        count = min(num_free, len(self._waiting))
        newcomers = _Running.start([self._waiting.pop() for _ in range(count)], self._limits, self._device)
        ended = self._draw(newcomers, self._prefill(newcomers), version)
        stay = newcomers.without(ended)
        if stay is not None:
            self._running = stay if self._running is None else self._running.joined(stay)
        return newcomers.completions(ended)

    def _advance(self, running: "_Running", version: int) -> list[Completion]:
        newest = running.tokens.gather(1, running.drawn[:, None] - 1).squeeze(1)
        positions = running.prompt_lengths + running.drawn - 1
        hidden = self._hidden(newest, positions, DecodeAttention(running.cache, positions))
        ended = self._draw(running, self._logits(hidden), version)
        self._running = running.without(ended)
        return running.completions(ended)

    def _prefill(self, running: "_Running") -> Tensor:
        """[B, V] logits of each request's next token; a prompt that several share is computed once."""
        packed, which = _unique_prompts(running.requests)
        lengths = torch.tensor([len(part) for part in packed])
        cu_seqlens = torch.zeros(len(packed) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        positions = torch.arange(int(lengths.sum())) - torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
        cu_seqlens = cu_seqlens.to(self._device)
        plan = PrefillAttention(running.cache, cu_seqlens, which)
        hidden = self._hidden(torch.cat(packed).to(self._device), positions.to(self._device), plan)
        logits = self._logits(hidden.index_select(0, cu_seqlens[1:].long() - 1))
        return logits if len(packed) == len(which) else logits.index_select(0, torch.tensor(which, device=self._device))

    def _hidden(self, tokens: Tensor, positions: Tensor, plan: PrefillAttention | DecodeAttention) -> Tensor:
        backbone = self._model.get_decoder()
        output = backbone(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan)
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        if self._logit_scale is not None:
            logits = logits * self._logit_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _draw(self, running: "_Running", logits: Tensor, version: int) -> dict[int, StopReason]:
        """Append one token to every row; rows that ended, with the reason."""
        tokens, logprobs = running.sampling.draw(logits, running.seeds, running.drawn)
        running.append(tokens, logprobs, version)
        is_full = running.drawn >= running.limits
        ended = dict.fromkeys(is_full.nonzero().flatten().tolist(), StopReason.LENGTH)
        if running.has_stops:
            ended.update((row, StopReason.STOP) for row in range(len(tokens)) if self._is_stopped(running, row))
        is_eos = torch.isin(tokens, self._eos) & ~running.ignores_eos
        ended.update((row, StopReason.EOS) for row in is_eos.nonzero().flatten().tolist())
        return ended

    def _is_stopped(self, running: "_Running", row: int) -> bool:
        sampling, drawn = running.requests[row].sampling, int(running.drawn[row])
        if int(running.tokens[row, drawn - 1]) in sampling.stop_ids:
            return True
        if not sampling.stop:
            return False
        assert self._decode is not None, "stop strings need a tokenizer"
        text = self._decode(running.tokens[row, :drawn].tolist())
        return any(stop in text for stop in sampling.stop)


@dataclass(slots=True)
class _Running:
    """B requests that decode together, and what they have so far.

    Attributes:
        prompt_lengths, drawn, limits: [B] int64: prompt tokens, tokens drawn, tokens that may be drawn.
        seeds: [B] int64. ignores_eos: [B] bool.
        tokens, logprobs, versions: [B, longest limit], filled up to `drawn`.
    """

    requests: list[GenerateRequest]
    sampling: RowSampling
    cache: KeyValueCache
    prompt_lengths: Tensor
    drawn: Tensor
    limits: Tensor
    seeds: Tensor
    ignores_eos: Tensor
    tokens: Tensor
    logprobs: Tensor
    versions: Tensor

    @staticmethod
    def start(requests: list[GenerateRequest], limits: Limits, device: torch.device) -> "_Running":
        prompts = [len(request.prompt_ids) for request in requests]
        prefixes = [0 if request.prefix is None else len(request.prefix.token_ids) for request in requests]
        limit = [
            min(request.sampling.max_tokens, limits.context_tokens - P)
            for request, P in zip(requests, prompts, strict=True)
        ]
        shape = (len(requests), max(limit))
        running = _Running(
            requests=requests,
            sampling=RowSampling([request.sampling for request in requests], device),
            cache=KeyValueCache(len(requests), max(P + C for P, C in zip(prompts, limit, strict=True))),
            prompt_lengths=torch.tensor(prompts, device=device),
            drawn=torch.tensor(prefixes, device=device),
            limits=torch.tensor(limit, device=device),
            seeds=torch.tensor([request.seed for request in requests], device=device),
            ignores_eos=torch.tensor([request.sampling.ignore_eos for request in requests], device=device),
            tokens=torch.zeros(shape, dtype=torch.long, device=device),
            logprobs=torch.zeros(shape, device=device),
            versions=torch.zeros(shape, dtype=torch.int32, device=device),
        )
        for row, request in enumerate(requests):
            if request.prefix is not None:
                running.tokens[row, : prefixes[row]] = request.prefix.token_ids.to(device)
                running.logprobs[row, : prefixes[row]] = request.prefix.logprobs.to(device)
                running.versions[row, : prefixes[row]] = request.prefix.versions.to(device)
        return running

    @property
    def has_stops(self) -> bool:
        return any(request.sampling.stop or request.sampling.stop_ids for request in self.requests)

    def append(self, tokens: Tensor, logprobs: Tensor, version: int) -> None:
        column = self.drawn[:, None]
        self.tokens.scatter_(1, column, tokens[:, None])
        self.logprobs.scatter_(1, column, logprobs[:, None])
        self.versions.scatter_(1, column, version)
        self.drawn = self.drawn + 1

    def completions(self, ended: dict[int, StopReason]) -> list[Completion]:
        if not ended:
            return []
        drawn = self.drawn.tolist()
        tokens, logprobs, versions = self.tokens.cpu(), self.logprobs.cpu(), self.versions.cpu()
        return [
            Completion(
                self.requests[row].request_id,
                tokens[row, : drawn[row]].clone(),
                logprobs[row, : drawn[row]].clone(),
                versions[row, : drawn[row]].clone(),
                reason,
            )
            for row, reason in ended.items()
        ]

    def as_requests(self) -> list[GenerateRequest]:
        """Each request with its tokens so far as its prefix."""
        parts = self.completions(dict.fromkeys(range(len(self.requests)), StopReason.ABORTED))
        return [replace(request, prefix=part) for request, part in zip(self.requests, parts, strict=True)]

    def without(self, ended: dict[int, StopReason]) -> "_Running | None":
        """The other rows; None if there are none."""
        if not ended:
            return self
        rows = [row for row in range(len(self.requests)) if row not in ended]
        if not rows:
            return None
        index = torch.tensor(rows, device=self.drawn.device)
        requests = [self.requests[row] for row in rows]
        return _Running(
            requests,
            RowSampling([request.sampling for request in requests], index.device),
            self.cache.kept(index),
            *(getattr(self, name).index_select(0, index) for name in _ROW_TENSORS),
        )

    def joined(self, other: "_Running") -> "_Running":
        """These rows, then the other's."""
        requests = self.requests + other.requests
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        columns = []
        for name in _ROW_TENSORS:
            parts = [getattr(self, name), getattr(other, name)]
            if parts[0].dim() == 2:
                parts = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
            columns.append(torch.cat(parts))
        sampling = RowSampling([request.sampling for request in requests], self.drawn.device)
        return _Running(requests, sampling, self.cache.joined(other.cache), *columns)


_ROW_TENSORS = (
    "prompt_lengths",
    "drawn",
    "limits",
    "seeds",
    "ignores_eos",
    "tokens",
    "logprobs",
    "versions",
)


def _unique_prompts(requests: Sequence[GenerateRequest]) -> tuple[list[Tensor], list[int]]:
    """Token ids to prefill, and for each request which of them is its own; shared by identity of the tensor."""
    unique: dict[int, int] = {}
    packed: list[Tensor] = []
    which = []
    for request in requests:
        key = id(request.prompt_ids) if request.prefix is None else id(request)
        if key not in unique:
            unique[key] = len(packed)
            prefix = [] if request.prefix is None else [request.prefix.token_ids]
            packed.append(torch.cat([request.prompt_ids, *prefix]))
        which.append(unique[key])
    return packed, which
