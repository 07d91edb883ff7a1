"""Log-probs, entropy and top-k of the next token from hidden states, without `[N, V]` logits.

The forward walks the tokens in chunks and keeps a few numbers per token; the backward computes each chunk's logits
again.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebbtide.errors import DataError, problem

__all__ = ["Head", "TokenStats", "token_stats"]

_CHUNK_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Head:
    """What turns hidden states into logits: `hidden @ weight.T + bias`, times `logit_scale`, then soft-capped.

    Attributes:
        weight: [V, D]; may be the embedding's own (tied), may be frozen.
        bias: [V], or None.
        softcap: logits become `softcap * tanh(logits / softcap)`, as in Gemma; None switches it off.
        logit_scale: multiplies the logits, as in Cohere; None switches it off.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float | None = None


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What is known of N next-token distributions.

    Attributes:
        logprobs: [N] float32, of the targets.
        entropy: [N] float32, in nats.
        topk_ids: [N, K] int32, the candidates given, or the likeliest tokens in falling order.
        topk_logprobs: [N, K] float32, theirs.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None


def token_stats(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    want_entropy: bool = False,
    entropy_grad: bool = True,
    top_k: int = 0,
    candidate_ids_NK: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> TokenStats:
    """Log-probs of `targets_N`, and what else is asked for, differentiable in the hidden states and the head.

    Raises:
        DataError: a temperature that is not above 0, a top-k larger than V, shapes that do not fit.
    """
    V = head.weight.shape[0]
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise DataError(problem("temperature", temperature, "must be finite and above 0"))
    if not 0 <= top_k <= V:
        raise DataError(problem("top_k", top_k, f"must be between 0 and the vocabulary's {V}"))
    chunk = chunk_tokens or max(1, _CHUNK_BYTES // (4 * V))
    logprobs, entropy, topk_ids, topk_logprobs = _TokenStats.apply(
        hidden_ND, head.weight, head.bias, head, targets_N, temperature, want_entropy, top_k, candidate_ids_NK, chunk
    )
    if entropy is not None and not entropy_grad:
        entropy = entropy.detach()
    return TokenStats(logprobs, entropy, topk_ids, topk_logprobs)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        targets_N: Tensor,
        temperature: float | Tensor,
        want_entropy: bool,
        top_k: int,
        candidate_ids_NK: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor | None, ...]:
        parts: list[list[Tensor]] = [[], [], [], [], []]
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden_ND[rows], weight_VD, bias_V, head, _rows(temperature, rows))[0]
            lse = logits.logsumexp(-1)
            parts[0].append(lse)
            parts[1].append(logits.gather(1, targets_N[rows, None].long()).squeeze(1) - lse)
            if want_entropy:
                parts[2].append(lse - (torch.softmax(logits, -1) * logits).sum(-1))
            if top_k or candidate_ids_NK is not None:
                ids = logits.topk(top_k, -1).indices if candidate_ids_NK is None else candidate_ids_NK[rows].long()
                parts[3].append(ids.int())
                parts[4].append(logits.gather(1, ids) - lse[:, None])
        lse_N, logprobs, entropy, topk_ids, topk_logprobs = (torch.cat(part) if part else None for part in parts)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy, topk_ids)
        ctx.head, ctx.temperature, ctx.chunk = (head.softcap, head.logit_scale), temperature, chunk
        ctx.set_materialize_grads(False)
        if topk_ids is not None:
            ctx.mark_non_differentiable(topk_ids)
        return logprobs, entropy, topk_ids, topk_logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_logprobs, d_entropy, _, d_topk = grads
        hidden_ND, weight_VD, bias_V, targets_N, lse, entropy, topk_ids = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros(weight_VD.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros(weight_VD.shape[0], dtype=torch.float32) if ctx.needs_input_grad[2] else None
        head = Head(weight_VD, bias_V, *ctx.head)
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            scale = _rows(ctx.temperature, rows)
            logits, tanh = _logits(hidden_ND[rows], weight_VD, bias_V, head, scale)
            logprob = logits - lse[rows, None]
            p = logprob.exp()
            d = torch.zeros_like(p)
            if d_logprobs is not None:
                d -= d_logprobs[rows, None] * p
                d.scatter_add_(1, targets_N[rows, None].long(), d_logprobs[rows, None])
            if d_topk is not None:
                d -= d_topk[rows].sum(-1, keepdim=True) * p
                d.scatter_add_(1, topk_ids[rows].long(), d_topk[rows])
            if d_entropy is not None:
                d -= d_entropy[rows, None] * p * (logprob + entropy[rows, None])
            d = d / scale if not isinstance(scale, float) or scale != 1 else d
            if tanh is not None:
                d = d * (1 - tanh * tanh)
            if head.logit_scale is not None:
                d = d * head.logit_scale
            if d_hidden is not None:
                d_hidden[rows] = (d @ weight_VD.float()).to(d_hidden.dtype)
            if d_weight is not None:
                d_weight.addmm_(d.T, hidden_ND[rows].float())
            if d_bias is not None:
                d_bias += d.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight_VD.dtype),
            None if d_bias is None else d_bias.to(bias_V.dtype),
            *([None] * 7),
        )


def _rows(temperature: float | Tensor, rows: slice) -> float | Tensor:
    if isinstance(temperature, Tensor) and temperature.ndim:
        return temperature[rows, None]
    return temperature


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, temperature: float | Tensor
) -> tuple[Tensor, Tensor | None]:
    logits = hidden.float() @ weight.float().T
    if bias is not None:
        logits += bias.float()
    if head.logit_scale is not None:
        logits *= head.logit_scale
    tanh = None
    if head.softcap is not None:
        tanh = torch.tanh(logits / head.softcap)
        logits = tanh * head.softcap
    if isinstance(temperature, Tensor) or temperature != 1:
        logits /= temperature
    return logits, tanh
