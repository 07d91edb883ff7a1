"""Prompts computed once a group: completions attend to the one copy of the prompt that they share.

A group of G completions repeats its prompt G times in a packed batch. Here the forward runs over each distinct prompt
once and over the completions, which attend to their prompt's keys and values and then to themselves. Each
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


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """Which tokens the forward runs over, and where each trained token is predicted.

    Attributes:
        source: [S] int64, each forward token's place in the packed batch: prompts first, then completions.
        predictor: [N] int64, for each trained token the forward token that predicts it.
        prompt_lengths: [R] int64, tokens of each distinct prompt.
        completion_lengths: [B] int64, forward tokens of each completion; may be 0.
        parents: [B] int64, the prompt of each completion.
    """

    source: Tensor
    predictor: Tensor
    prompt_lengths: Tensor
    completion_lengths: Tensor
    parents: Tensor

    @staticmethod
    def of(batch: TrainBatch) -> "PrefixLayout":
        """The layout of a batch whose integer fields are on the host.

        A sequence's prompt is what stands before its first trained token. Sequences of one group share it where all
        its tokens are equal.
        """
        starts, lengths = batch.cu_seqlens[:-1].long(), batch.lengths
        sequence_N = batch.sequence_ids[batch.loss_mask]
        position_N = batch.position_ids[batch.loss_mask]
        prompt = lengths.clone().scatter_reduce_(0, sequence_N, position_N, "amin")
        owner = _owners(batch, starts, prompt)
        owners = (owner == torch.arange(len(owner))).nonzero().squeeze(1)
        parents = torch.zeros_like(owner).index_put_((owners,), torch.arange(len(owners)))[owner]
        prompt_lengths = prompt[owners]
        completion_lengths = (lengths - prompt - 1).clamp(min=0)
        source = torch.cat([ranges(starts[owners], prompt_lengths), ranges(starts + prompt, completion_lengths)])
        prompt_ends = prompt_lengths.cumsum(0) - 1
        completion_starts = prompt_lengths.sum() + completion_lengths.cumsum(0) - completion_lengths
        into_N = position_N - prompt[sequence_N]
        after_first = completion_starts[sequence_N] + into_N - 1
        predictor = torch.where(into_N == 0, prompt_ends[parents[sequence_N]], after_first)
        return PrefixLayout(source, predictor, prompt_lengths, completion_lengths, parents)

    @property
    def pays(self) -> bool:
        """Whether at least an eighth of the tokens falls away, and the masks of its blocks stay small."""
        num_packed = int((self.completion_lengths + 1 + self.prompt_lengths[self.parents]).sum())
        keys = self.completion_lengths + self.prompt_lengths[self.parents]
        mask_elements = int((self.completion_lengths * keys).sum())
        return 8 * len(self.source) <= 7 * num_packed and mask_elements <= _MAX_MASK_ELEMENTS


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


def _owners(batch: TrainBatch, starts: Tensor, prompt: Tensor) -> Tensor:
    """[B], for each sequence the first one that has the same prompt; itself where there is none."""
    first: dict[tuple[int, int], int] = {}
    keys = zip(batch.group_ids.tolist(), prompt.tolist(), strict=True)
    candidate = torch.tensor([first.setdefault(key, b) for b, key in enumerate(keys)])
    mine, other = ranges(starts, prompt), ranges(starts[candidate], prompt)
    differs = (batch.tokens[mine] != batch.tokens[other]).long()
    sequence = torch.repeat_interleave(torch.arange(len(prompt)), prompt)
    num_different = torch.zeros(len(prompt), dtype=torch.long).index_add_(0, sequence, differs)
    return candidate.where(num_different == 0, torch.arange(len(prompt)))


def _similar_in_both(completion_lengths: Tensor, prompt_lengths: Tensor) -> list[list[int]]:
    """Completions grouped so that within a group neither they nor their prompts differ much in length."""
    prompts = prompt_lengths.tolist()
    groups = []
    for rows in similar(completion_lengths.tolist()):
        groups += [[rows[i] for i in inner] for inner in similar([prompts[row] for row in rows])]
    return groups
