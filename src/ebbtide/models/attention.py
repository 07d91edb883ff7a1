"""Attention over tokens packed in one row, behind transformers' attention interface.

A model built by `models.build` asks this module for attention in every layer and gets its answer from the plan that
the caller passed to the model's forward: `backbone(input_ids, position_ids, use_cache=False, plan=plan)`. A plan knows
which tokens belong together, so a sequence never sees its neighbour, no [T, T] mask exists, and a call without a plan
is an error instead of silently unpacked attention.

`PackedAttention` is the plan of training and scoring; the rollout's plan, which also keeps keys and values, is
`CachedAttention` in `ebbtide.models.cache`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

from ebbtide.errors import ModelError, problem

__all__ = ["ATTENTION", "AttentionCall", "AttentionPlan", "PackedAttention", "attend_dense", "register"]

ATTENTION = "ebbtide"
"""The name under which transformers knows this attention (`attn_implementation`)."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's request.

    Attributes:
        layer: the layer's number.
        query: [T, Hq, d]; key and value: [T, Hkv, d], rotary positions applied.
        scale: factor of the scores.
        window: tokens that a query sees, itself included; None sees all before it.
        softcap: scores are softcap * tanh(scores / softcap); None leaves them.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None


class AttentionPlan(Protocol):
    """Who attends to whom."""

    def attend(self, call: AttentionCall) -> Tensor:
        """[T, Hq, d], in the order of the queries."""
        ...


def register() -> None:
    """Make the name known to transformers; calling it again does nothing."""
    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The side of transformers: query [1, Hq, T, d], key and value [1, Hkv, T, d]; returns [1, T, Hq, d]."""
    name = type(module).__name__
    if plan is None:
        raise ModelError(problem(name, None, "attention was called without a plan", "Pass plan=PackedAttention(...)"))
    if attention_mask is not None or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        rule = "packed attention takes one row of tokens, no mask and no transformers cache"
        raise ModelError(problem(name, tuple(query.shape), rule, "Call the model with use_cache=False and no mask"))
    if dropout or kwargs.get("s_aux") is not None or not getattr(module, "is_causal", True):
        rule = "attention dropout, attention sinks and bidirectional attention are not supported in packed batches"
        raise ModelError(problem(name, dropout, rule, "Set attention_dropout to 0, or choose another model"))
    call = AttentionCall(
        layer=int(getattr(module, "layer_idx", 0)),
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return plan.attend(call)[None], None


class PackedAttention:
    """Causal attention within each packed sequence.

    Sequences of similar length are laid side by side as [b, L, H, d], padded at their end only inside this call: under
    a causal mask nothing before a pad can see it, so no mask is needed, and pads receive no gradient.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        """Plan for the sequences `cu_seqlens[b]:cu_seqlens[b + 1]`; [B+1] int32, on the tokens' device or the host."""
        self.calls = 0
        lengths = cu_seqlens.diff().tolist()
        self._blocks, order = _blocks(lengths)
        starts = cu_seqlens[:-1].tolist()
        num_slots = sum(size * length for size, length in self._blocks)
        self._gather: Tensor | None = None
        self._scatter: Tensor | None = None
        if num_slots == sum(lengths) and order == sorted(order):
            return
        start_B, length_B = torch.tensor(starts)[order], torch.tensor(lengths)[order]
        padded_B = torch.tensor([length for size, length in self._blocks for _ in range(size)])
        first_B = padded_B.cumsum(0) - padded_B
        within = torch.arange(num_slots) - torch.repeat_interleave(first_B, padded_B)
        inside = within < torch.repeat_interleave(length_B, padded_B)
        source = torch.repeat_interleave(start_B, padded_B) + within
        last = torch.repeat_interleave(start_B + length_B - 1, padded_B)
        self._gather = torch.where(inside, source, last).to(cu_seqlens.device)
        scatter = torch.empty(sum(lengths), dtype=torch.long)
        scatter[source[inside]] = torch.arange(num_slots)[inside]
        self._scatter = scatter.to(cu_seqlens.device)

    def attend(self, call: AttentionCall) -> Tensor:
        """[T, Hq, d]."""
        self.calls += 1
        parts = [call.query, call.key, call.value]
        if self._gather is not None and self._scatter is not None:
            parts = [_Pad.apply(part, self._gather, self._scatter) for part in parts]  # type: ignore[no-untyped-call]
        outputs, start = [], 0
        for size, length in self._blocks:
            stop = start + size * length
            query, key, value = (part[start:stop].unflatten(0, (size, length)).transpose(1, 2) for part in parts)
            outputs.append(attend_dense(query, key, value, call).transpose(1, 2).flatten(0, 1))
            start = stop
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self._gather is None or self._scatter is None:
            return packed
        return _Unpad.apply(packed, self._scatter)  # type: ignore[no-any-return, no-untyped-call]


def attend_dense(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, mask: Tensor | None = None) -> Tensor:
    """Attention of [b, Hq, q, d] over [b, Hkv, k, d].

    Args:
        query: where k > q, the queries are the last q of the k tokens.
        key: see above.
        value: see above.
        call: scale, window and softcap; its tensors are not read.
        mask: broadcastable to [b, 1, q, k] bool, True where attended; None means causal.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask is None and call.window is not None and call.window < num_keys:
        offset = num_keys - num_queries
        ahead = torch.arange(num_keys, device=query.device) - torch.arange(num_queries, device=query.device)[:, None]
        mask = (ahead <= offset) & (ahead > offset - call.window)
    if call.softcap is not None:
        return _attend_softcapped(query, key, value, call, mask)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and num_queries > 1,
        scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_softcapped(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, mask: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    assert call.softcap is not None, call
    scores = torch.tanh(query @ key.transpose(2, 3) * (call.scale / call.softcap)) * call.softcap
    if mask is None:
        num_queries, num_keys = scores.shape[-2:]
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.to(value.dtype) @ value


def _blocks(lengths: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Blocks as (sequences, padded length), and the sequences in the order in which the blocks hold them.

    A block takes sequences down to three quarters of its longest, so padding stays below a third, and blocks few.
    """
    if len(set(lengths)) == 1:
        return [(len(lengths), lengths[0])], list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    blocks: list[tuple[int, int]] = []
    for b in order:
        if blocks and 4 * lengths[b] >= 3 * blocks[-1][1]:
            blocks[-1] = (blocks[-1][0] + 1, blocks[-1][1])
        else:
            blocks.append((1, lengths[b]))
    return blocks, order


class _Pad(torch.autograd.Function):
    """Rows to padded slots. Pads receive a gradient of exactly 0, so the backward is a plain gather as well."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (scatter,) = ctx.saved_tensors
        return grads[0].index_select(0, scatter), None, None


class _Unpad(torch.autograd.Function):
    """Padded slots back to rows."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        ctx.num_slots = slots.shape[0]
        return slots.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (scatter,) = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.num_slots, *grads[0].shape[1:])
        return grad.index_copy_(0, scatter, grads[0].contiguous()), None
