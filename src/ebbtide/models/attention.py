"""Attention over tokens packed in one row, behind transformers' attention interface.

A model built by `models.build` asks this module for attention in every layer and gets its answer from the plan that
the caller passed to the model's forward: `backbone(input_ids, position_ids, use_cache=False, plan=plan)`. A plan knows
which tokens belong together, so a sequence never sees its neighbour, no [T, T] mask exists, and a call without a plan
is an error instead of silently unpacked attention.

`PackedAttention` is the plan of training and scoring; the rollout's plan, which also keeps keys and values, is
`CachedAttention` in `ebbtide.models.cache`.
"""

from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

from ebbtide.errors import ModelError, problem
from ebbtide.models.padding import PaddedBlocks, similar

__all__ = ["ATTENTION", "AttentionCall", "AttentionPlan", "PackedAttention", "attend_dense", "attend_heads", "register"]

ATTENTION = "ebbtide"
"""The name under which transformers knows this attention (`attn_implementation`)."""

_BIASES = ("s_aux", "sinks", "position_bias", "head_mask", "block_mask")
"""Arguments by which models change scores or softmax."""


_known: WeakSet[nn.Module] = WeakSet()


class AttentionCall(NamedTuple):
    """One layer's request; a tuple, since every layer of every token makes one.

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

    def rows(self, chosen: slice) -> "AttentionCall":
        """The same request of some tokens alone."""
        return self._replace(query=self.query[chosen], key=self.key[chosen], value=self.value[chosen])


class AttentionPlan(Protocol):
    """Who attends to whom.

    Attributes:
        calls: layers that have asked so far; a model that has more of them attended somewhere else.
    """

    calls: int

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
    if module not in _known:
        _refuse_module(module, sliding_window)
        _known.add(module)
    _refuse_call(module, query, key, attention_mask, dropout, kwargs)
    if plan is None:
        rule = "attention was called without a plan, or the model's layers do not hand it on"
        remedy = "Pass plan=PackedAttention(...); where it was passed, choose another model"
        raise ModelError(problem(type(module).__name__, None, rule, remedy))
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return plan.attend(call)[None], None


def _refuse_call(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, dropout: float, others: dict[str, Any]
) -> None:
    """What a plan would silently leave out is an error."""
    name = type(module).__name__
    if attention_mask is not None or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        rule = "packed attention takes one row of tokens, no mask and no transformers cache"
        raise ModelError(problem(name, tuple(query.shape), rule, "Call the model with use_cache=False and no mask"))
    if dropout:
        rule = "attention dropout is not supported in packed batches"
        raise ModelError(problem(name, dropout, rule, "Set attention_dropout to 0"))
    unknown = [key for key in _BIASES if others.get(key) is not None]
    if unknown or others.get("is_causal") is False:
        rule = "attention sinks, position biases and bidirectional attention are not supported in packed batches"
        raise ModelError(problem(name, unknown or "bidirectional", rule, "Choose another model"))


def _refuse_module(module: nn.Module, sliding_window: int | None) -> None:
    """What does not change from call to call."""
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    if not getattr(module, "is_causal", True):
        rule = "bidirectional attention is not supported in packed batches"
        raise ModelError(problem(name, "bidirectional", rule, "Choose another model"))
    if layer is None:
        rule = "its attention layers have no number (layer_idx), so their keys and values cannot be told apart"
        raise ModelError(problem(name, layer, rule, "Choose another model"))
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if sliding_window is None and kinds is not None and layer < len(kinds) and kinds[layer] == "sliding_attention":
        rule = f"layer {layer} has a sliding window in its config and attends without one"
        raise ModelError(problem(name, sliding_window, rule, "Choose another model"))


class PackedAttention:
    """Causal attention within each packed sequence.

    Sequences of similar length are laid side by side, padded at their end: under a causal mask no token sees what
    comes after it, so that no mask is needed.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        """Plan for the sequences `cu_seqlens[b]:cu_seqlens[b + 1]`; [B+1] int32, on the tokens' device or the host."""
        self.calls = 0
        lengths = cu_seqlens.diff().tolist()
        self._blocks = PaddedBlocks(lengths, similar(lengths), cu_seqlens.device)

    def attend(self, call: AttentionCall) -> Tensor:
        """[T, Hq, d]."""
        self.calls += 1
        queries, keys, values = (self._blocks.split(part) for part in (call.query, call.key, call.value))
        blocks = zip(queries, keys, values, strict=True)
        return self._blocks.merge([attend_dense(query, key, value, call) for query, key, value in blocks])


def attend_dense(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, mask: Tensor | None = None) -> Tensor:
    """[b, q, Hq, d], attention of [b, q, Hq, d] over [b, k, Hkv, d]; otherwise as `attend_heads`."""
    return attend_heads(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), call, mask).transpose(1, 2)


def attend_heads(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, mask: Tensor | None = None) -> Tensor:
    """[b, Hq, q, d], attention of [b, Hq, q, d] over [b, Hkv, k, d].

    Args:
        query: where k > q, the queries are the last q of the k tokens.
        key: see above.
        value: see above.
        call: scale, window and softcap; its tensors are not read.
        mask: broadcastable to [b, 1, q, k] bool, True where attended; None means causal.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_windowed = call.window is not None and call.window < num_keys
    # scaled_dot_product_attention takes the queries of its is_causal for the first ones, not the last.
    if mask is None and (is_windowed or call.softcap is not None or 1 < num_queries < num_keys):
        mask = _causal_mask(num_queries, num_keys, call.window, query.device)
    if call.softcap is not None:
        assert mask is not None, call
        return _attend_softcapped(query, key, value, call, mask)
    groups = query.shape[1] // key.shape[1]
    if num_queries == 1 and groups > 1:
        # The heads that share a key head read it as queries of one head: several times faster on the CPU.
        query = query.view(query.shape[0], key.shape[1], groups, query.shape[3])
        return F.scaled_dot_product_attention(query, key, value, mask, scale=call.scale).flatten(1, 2)[:, :, None]
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None and num_queries > 1, scale=call.scale, enable_gqa=groups > 1
    )


def _causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[q, k] bool."""
    position = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    column = torch.arange(num_keys, device=device)
    seen = column <= position
    return seen if window is None else seen & (column > position - window)


def _attend_softcapped(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, mask: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    assert call.softcap is not None, call
    scores = torch.tanh(query @ key.transpose(2, 3) * (call.scale / call.softcap)) * call.softcap
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.to(value.dtype) @ value
