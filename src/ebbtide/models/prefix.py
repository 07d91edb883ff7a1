"""Prompts computed once a group: completions attend to the one copy of the prompt that they share.

A group of G completions repeats its prompt G times in a packed batch. Here the forward runs over each distinct prompt
once and over the distinct completions, which attend to their prompt's keys and values and then to themselves. A
completion's last token is left out as well, since nothing is predicted from it. Log-probs and gradients are those of
the packed batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.models.attention import AttentionCall, PackedAttention, attend_dense
from ebbtide.models.padding import PaddedBlocks, ranges, similar
from ebbtide.types import TrainBatch

__all__ = ["PrefixAttention", "PrefixLayout"]

_MAX_MASK_ELEMENTS = 1 << 26
_HASH_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """Which tokens the forward runs over, and where each trained token is predicted.

    Attributes:
        source: [S] int64, each forward token's place in the packed batch: prompts first, then completions.
        predictor: [N] int64, for each trained token the forward token that predicts it.
        prompt_lengths: [R] int64, tokens of each distinct prompt.
        completion_lengths: [U] int64, forward tokens of each distinct completion; may be 0.
        parents: [U] int64, the prompt of each distinct completion.
        num_packed: tokens of the packed batch.
    """

    source: Tensor
    predictor: Tensor
    prompt_lengths: Tensor
    completion_lengths: Tensor
    parents: Tensor
    num_packed: int

    @staticmethod
    def of(batch: TrainBatch) -> "PrefixLayout":
        """The layout of a batch whose integer fields are on the host.

        A sequence's prompt is what stands before its first trained token. Sequences of one group share it where all
        its tokens are equal, and share what follows where that is equal too, but for the last token.
        """
        starts, lengths = batch.cu_seqlens[:-1].long(), batch.lengths
        sequence_N = batch.sequence_ids[batch.loss_mask]
        position_N = batch.position_ids[batch.loss_mask]
        prompt = lengths.clone().scatter_reduce_(0, sequence_N, position_N, "amin")
        completion = (lengths - prompt - 1).clamp(min=0)
        prompts = _Distinct.of(batch.tokens, starts, prompt, batch.group_ids.long())
        completions = _Distinct.of(batch.tokens, starts + prompt, completion, prompts.number)
        prompt_lengths, completion_lengths = prompt[prompts.first], completion[completions.first]
        source = torch.cat(
            [
                ranges(starts[prompts.first], prompt_lengths),
                ranges((starts + prompt)[completions.first], completion_lengths),
            ]
        )
        prompt_ends = prompt_lengths.cumsum(0) - 1
        completion_starts = prompt_lengths.sum() + completion_lengths.cumsum(0) - completion_lengths
        into_N = position_N - prompt[sequence_N]
        after_first = completion_starts[completions.number[sequence_N]] + into_N - 1
        predictor = torch.where(into_N == 0, prompt_ends[prompts.number[sequence_N]], after_first)
        parents = prompts.number[completions.first]
        return PrefixLayout(source, predictor, prompt_lengths, completion_lengths, parents, batch.num_tokens)

    @property
    def pays(self) -> bool:
        """Whether at least an eighth of the tokens falls away, and the masks of its blocks stay small."""
        keys = self.completion_lengths + self.prompt_lengths[self.parents]
        mask_elements = int((self.completion_lengths * keys).sum())
        return 8 * len(self.source) <= 7 * self.num_packed and mask_elements <= _MAX_MASK_ELEMENTS


class PrefixAttention:
    """Causal attention of prompts within themselves, and of completions over their prompt and then themselves."""

    def __init__(self, layout: PrefixLayout, device: torch.device) -> None:
        self.calls = 0
        self._num_prompt_tokens = int(layout.prompt_lengths.sum())
        ends = torch.nn.functional.pad(layout.prompt_lengths.cumsum(0), (1, 0)).int()
        self._prompts = PackedAttention(ends.to(device))
        present = layout.completion_lengths.nonzero().squeeze(1)
        lengths, parents = layout.completion_lengths[present], layout.parents[present]
        rows = _similar_in_both(lengths, layout.prompt_lengths[parents])
        self._completions = PaddedBlocks(lengths.tolist(), rows, device)
        self._pasts = [_Past(layout.prompt_lengths, parents[torch.tensor(block)], device) for block in rows]
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """[S, Hq, d], prompts first."""
        self.calls += 1
        prompts = call.rows(slice(0, self._num_prompt_tokens))
        own = call.rows(slice(self._num_prompt_tokens, None))
        attended = []
        blocks = zip(*(self._completions.split(part) for part in (own.query, own.key, own.value)), strict=True)
        for number, (query, key, value) in enumerate(blocks):
            past = self._pasts[number]
            keys = torch.cat([past.of(prompts.key), key], dim=1)
            values = torch.cat([past.of(prompts.value), value], dim=1)
            attended.append(attend_dense(query, keys, values, call, self._mask(number, call.window)))
        over_prompts = self._prompts.attend(prompts)
        return torch.cat([over_prompts, self._completions.merge(attended)]) if attended else over_prompts

    def _mask(self, number: int, window: int | None) -> Tensor:
        key = (number, window)
        if key not in self._masks:
            self._masks[key] = self._pasts[number].mask(self._completions.shapes[number][1], window)
        return self._masks[key]


class _Past:
    """The prompts of one block of b completions, padded to p tokens."""

    def __init__(self, prompt_lengths: Tensor, parents: Tensor, device: torch.device) -> None:
        """prompt_lengths: [R] of all prompts. parents: [b], the prompt of each completion of the block."""
        distinct, child = parents.unique(return_inverse=True)
        lengths = prompt_lengths[distinct]
        self._shape = (len(distinct), int(lengths.max()))
        starts = (prompt_lengths.cumsum(0) - prompt_lengths)[distinct]
        within = torch.arange(self._shape[1])
        self._gather = (starts[:, None] + torch.minimum(within, lengths[:, None] - 1)).flatten().to(device)
        self._child = child.to(device)
        self._lengths = prompt_lengths[parents].to(device)

    def of(self, prompt_rows: Tensor) -> Tensor:
        """[b, p, H, d] from [P, H, d]."""
        distinct = prompt_rows.index_select(0, self._gather)
        return distinct.view(*self._shape, *prompt_rows.shape[1:]).index_select(0, self._child)

    def mask(self, num_own: int, window: int | None) -> Tensor:
        """[b, 1, q, p + q] bool: a completion token sees its whole prompt and itself, within the window."""
        device, lengths = self._lengths.device, self._lengths[:, None]
        own = lengths + torch.arange(num_own, device=device)
        before = torch.arange(self._shape[1], device=device).expand(len(lengths), -1)
        hidden = torch.iinfo(torch.int64).max // 2
        keys = torch.cat([before.where(before < lengths, hidden), own], dim=1)[:, None, None]
        queries = own[:, None, :, None]
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)


@dataclass(frozen=True, slots=True)
class _Distinct:
    """Spans of tokens, of which those with equal tokens and equal label are one.

    Attributes:
        number: [B] int64, which distinct span each span is.
        first: [U] int64, the first span that each distinct one stands for.
    """

    number: Tensor
    first: Tensor

    @staticmethod
    def of(tokens: Tensor, starts: Tensor, lengths: Tensor, labels: Tensor) -> "_Distinct":
        """Spans are found by a hash and then compared token by token, so that none is shared by accident."""
        B = len(starts)
        span = torch.repeat_interleave(torch.arange(B), lengths)
        mine = ranges(starts, lengths)
        within = ranges(torch.zeros_like(lengths), lengths)
        mixed = (tokens[mine] + 1) * (2 * within + 1) * _HASH_FACTOR
        hashes = torch.zeros(B, dtype=torch.long).index_add_(0, span, mixed ^ (mixed >> 29))
        seen: dict[tuple[int, int, int], int] = {}
        keys = zip(labels.tolist(), lengths.tolist(), hashes.tolist(), strict=True)
        candidate = torch.tensor([seen.setdefault(key, b) for b, key in enumerate(keys)])
        differs = (tokens[mine] != tokens[ranges(starts[candidate], lengths)]).long()
        num_different = torch.zeros(B, dtype=torch.long).index_add_(0, span, differs)
        owner = candidate.where(num_different == 0, torch.arange(B))
        first, number = owner.unique(return_inverse=True)
        return _Distinct(number, first)


def _similar_in_both(completion_lengths: Tensor, prompt_lengths: Tensor) -> list[list[int]]:
    """Completions grouped so that within a group neither they nor their prompts differ much in length."""
    prompts = prompt_lengths.tolist()
    groups = []
    for rows in similar(completion_lengths.tolist()):
        groups += [[rows[i] for i in inner] for inner in similar([prompts[row] for row in rows])]
    return groups
