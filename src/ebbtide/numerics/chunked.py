"""One pass over tiles of logits for the statistics, one for their gradient; between them a few numbers per token.

With z the logits, p their softmax and H its entropy, for upstream gradients g of the picked log-probs and h of H:

    d z_v = sum over picks k of g_k * ([v = k] - p_v)  -  h * p_v * (log p_v + H)

so the log of the normaliser and H are all that the backward needs beside the logits, which it computes again. No
gradient can be computed in the forward: a policy loss knows its upstream gradient only after it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ebbtide.numerics.sources import GivenLogits, HeadLogits, LogitSource
from ebbtide.numerics.temperature import is_readable
from ebbtide.numerics.tiles import FLOOR, Buffers, LogitRule, Tiling
from ebbtide.numerics.topk import RunningTopK

__all__ = ["Request", "given_stats", "head_stats"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        targets: [N] ids whose log-prob is wanted.
        rule: from raw logits to logits.
        dtype: of the arithmetic and the results.
        want_entropy: whether to compute it.
        entropy_grad: whether it is differentiable.
        candidates: [N, K] ids whose log-probs are wanted too, or None.
        top_k: how many of the likeliest tokens, 0 for none.
        chunk_tokens: tokens of a tile at most, or None.
    """

    targets: Tensor
    rule: LogitRule
    dtype: torch.dtype
    want_entropy: bool
    entropy_grad: bool
    candidates: Tensor | None
    top_k: int
    chunk_tokens: int | None


Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""logprobs [N], entropy [N], topk_ids [N, K] int32, topk_logprobs [N, K]."""


_MASKED = -1e20  # below it a logit is FLOOR, perhaps divided by a temperature


def head_stats(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: Request) -> Results:
    """Statistics from hidden states and a head, differentiable in all three where they require grad."""
    results: Results = _HeadStats.apply(hidden_ND, weight_VD, bias_V, request)  # type: ignore[no-untyped-call]
    return results


def given_stats(logits_NV: Tensor, request: Request) -> Results:
    """Statistics from logits that exist, differentiable in them."""
    results: Results = _GivenStats.apply(logits_NV, request)  # type: ignore[no-untyped-call]
    return results


class _HeadStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: Request) -> Results:
        tiling = Tiling.of(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device, request.chunk_tokens)
        source = HeadLogits(hidden_ND, weight_VD, bias_V, request.rule, tiling, dtype=request.dtype)
        results, lse_N = _forward(source, request)
        _save(ctx, request, results, lse_N, hidden_ND, weight_VD, bias_V)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        (hidden_ND, weight_VD, bias_V), rule, slopes = _slopes(ctx, upstream)
        if slopes is None:
            return None, None, None, None
        wanted = ctx.needs_input_grad[:3]
        rows = slopes.active_rows()
        hidden_nD = hidden_ND if rows is None else hidden_ND[rows]
        if rows is not None:
            slopes, rule = slopes.select(rows), _select(rule, rows)
        tiling = Tiling.of(hidden_nD.shape[0], weight_VD.shape[0], hidden_ND.device, ctx.request.chunk_tokens)
        source = HeadLogits(hidden_nD, weight_VD, bias_V, rule, tiling, dtype=ctx.request.dtype, wanted=wanted)
        _backward(source, rule, slopes)
        d_hidden = source.d_hidden
        if d_hidden is not None and rows is not None:
            d_hidden = hidden_ND.new_zeros(hidden_ND.shape).index_copy_(0, rows, d_hidden.to(hidden_ND.dtype))
        return (None if d_hidden is None else d_hidden.to(hidden_ND.dtype)), source.d_weight, source.d_bias, None


class _GivenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, request: Request) -> Results:
        tiling = Tiling.of(logits_NV.shape[0], logits_NV.shape[1], logits_NV.device, request.chunk_tokens)
        results, lse_N = _forward(GivenLogits(logits_NV, request.rule, tiling), request)
        _save(ctx, request, results, lse_N, logits_NV)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        (logits_NV,), rule, slopes = _slopes(ctx, upstream)
        if slopes is None:
            return None, None
        tiling = Tiling.of(logits_NV.shape[0], logits_NV.shape[1], logits_NV.device, ctx.request.chunk_tokens)
        source = GivenLogits(logits_NV, rule, tiling, is_wanted=True)
        _backward(source, rule, slopes)
        return source.d_logits, None


def _forward(source: LogitSource, request: Request) -> tuple[Results, Tensor]:
    """The results, and the log of each token's normaliser [N]."""
    tiling, dtype, device = source.tiling, request.dtype, request.targets.device
    buffers = Buffers(tiling, dtype, device)
    softmax = _RunningSoftmax(tiling.num_tokens, request.want_entropy, dtype, device)
    picks = _Picks(_pick_ids(request.targets, request.candidates), dtype)
    topk = RunningTopK(tiling.num_tokens, request.top_k, dtype, device) if request.top_k else None
    for vocab in tiling.vocab_slices():
        source.enter(vocab)
        for rows in tiling.token_slices():
            z = source.logits(buffers, rows, vocab)
            picks.take(z, rows, vocab)
            if topk is not None:
                topk.take(z, rows, vocab)
            softmax.take_(z, rows, buffers.tile("spare", rows, vocab) if request.want_entropy else None)
            del z  # before the next product asks for as much
    lse_N, entropy_N = softmax.finish()
    logprobs = _logprobs(picks.logits, lse_N)
    ids, topk_logprobs = None, None
    if topk is not None:
        ids, topk_logprobs = topk.ids, _logprobs(topk.values, lse_N)
    elif request.candidates is not None:
        ids, topk_logprobs = request.candidates.to(torch.int32, copy=True), logprobs[:, 1:].contiguous()
    return (logprobs[:, 0].contiguous(), entropy_N, ids, topk_logprobs), lse_N


def _backward(source: LogitSource, rule: LogitRule, slopes: "_Slopes") -> None:
    """Every tile of logits again, turned into its gradient in place and handed to the source."""
    tiling = source.tiling
    buffers = Buffers(tiling, slopes.lse.dtype, slopes.lse.device)
    for vocab in tiling.vocab_slices():
        source.enter(vocab)
        for rows in tiling.token_slices():
            tanh = buffers.tile("tanh", rows, vocab) if rule.softcap is not None else None
            z = source.logits(buffers, rows, vocab, tanh)
            spare = buffers.tile("spare", rows, vocab) if slopes.of_entropy is not None else None
            grad = slopes.grad_(z, rows, vocab, spare)
            if tanh is not None:
                grad.addcmul_(grad, tanh.square_(), value=-1)
            source.accept(grad, rows, vocab)
            del z, grad  # before the next product asks for as much


class _RunningSoftmax:
    """Maximum, sum of exponentials and, for the entropy, their first moment, all relative to the maximum so far."""

    def __init__(self, num_tokens: int, want_entropy: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._max = torch.full((num_tokens,), FLOOR, dtype=dtype, device=device)
        self._sum = torch.zeros(num_tokens, dtype=dtype, device=device)
        self._moment = torch.zeros(num_tokens, dtype=dtype, device=device) if want_entropy else None

    def take_(self, z: Tensor, rows: slice, spare: Tensor | None) -> None:
        """Merge a tile, whose buffer is spent; `spare` is a second one, for the entropy."""
        tile_max = z.amax(1)
        new_max = torch.maximum(self._max[rows], tile_max)
        drop = self._max[rows] - new_max
        decay = drop.exp()
        z.sub_(new_max[:, None])
        if self._moment is not None and spare is not None:
            torch.exp(z, out=spare)
            old = self._moment[rows].add_(self._sum[rows] * drop).mul_(decay)
            self._sum[rows].mul_(decay).add_(spare.sum(1))
            old.add_(spare.mul_(z).sum(1))
        else:
            self._sum[rows].mul_(decay).add_(z.exp_().sum(1))
        self._max[rows] = new_max

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """The log of the normaliser [N], and the entropy [N] where wanted."""
        log_sum = self._sum.log()
        entropy = None if self._moment is None else log_sum - self._moment / self._sum
        return self._max + log_sum, entropy


class _Picks:
    """Collects the logits of given ids [N, P]; an id outside the vocabulary gives NaN."""

    def __init__(self, ids: Tensor, dtype: torch.dtype) -> None:
        self._ids = ids
        self.logits = torch.full(ids.shape, torch.nan, dtype=dtype, device=ids.device)

    def take(self, z: Tensor, rows: slice, vocab: slice) -> None:
        local, is_here = _local(self._ids[rows], vocab)
        self.logits[rows] = torch.where(is_here, z.gather(1, local), self.logits[rows])


@dataclass(frozen=True, slots=True)
class _Slopes:
    """What the gradient of a tile is made of.

    Attributes:
        lse: [N] log of the normaliser.
        ids: [N, P] picked ids.
        of_picks: [N, P] upstream gradients of their log-probs; the rule's slope is already in these three.
        of_all: [N] what every probability is multiplied by: minus their sum over P, minus the entropy's constant part.
        of_entropy: [N] minus the upstream gradient of the entropy, or None.
    """

    lse: Tensor
    ids: Tensor
    of_picks: Tensor
    of_all: Tensor
    of_entropy: Tensor | None

    def active_rows(self) -> Tensor | None:
        """Tokens with any gradient at all; None where nearly all have, or where asking would stall a device.

        Clipped tokens, and those of groups whose rewards are all equal, have none, and cost nothing here.
        """
        if not is_readable(self.of_picks):
            return None
        is_active = (self.of_picks != 0).any(1)
        if self.of_entropy is not None:
            is_active |= self.of_entropy != 0
        rows = is_active.nonzero().squeeze(1)
        return rows if rows.shape[0] < 0.9 * is_active.shape[0] else None

    def select(self, rows: Tensor) -> "_Slopes":
        entropy = None if self.of_entropy is None else self.of_entropy[rows]
        return _Slopes(self.lse[rows], self.ids[rows], self.of_picks[rows], self.of_all[rows], entropy)

    def grad_(self, z: Tensor, rows: slice, vocab: slice, spare: Tensor | None) -> Tensor:
        """The tile's gradient, in the buffer of its logits or in `spare`."""
        z.sub_(self.lse[rows, None])
        if self.of_entropy is None:
            grad = z.exp_().mul_(self.of_all[rows, None])
        else:
            grad = torch.exp(z, out=spare)
            grad.mul_(z.mul_(self.of_entropy[rows, None]).add_(self.of_all[rows, None]))
        local, is_here = _local(self.ids[rows], vocab)
        return grad.scatter_add_(1, local, self.of_picks[rows] * is_here)


def _save(ctx: Any, request: Request, results: Results, lse_N: Tensor, *inputs: Tensor | None) -> None:
    _, entropy, ids, _ = results
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(x for x in (ids, None if request.entropy_grad else entropy) if x is not None))
    temperature = request.rule.temperature
    tempered = temperature if isinstance(temperature, Tensor) else None
    ctx.save_for_backward(lse_N, entropy if request.entropy_grad else None, request.targets, ids, tempered, *inputs)
    # Tensors live on in save_for_backward alone, where hooks (offloading, checkpointing) see them.
    rule = replace(request.rule, temperature=None if tempered is not None else temperature)
    ctx.request = replace(request, targets=lse_N.new_empty(0), candidates=None, rule=rule)


def _slopes(ctx: Any, upstream: tuple[Tensor | None, ...]) -> tuple[list[Any], LogitRule, _Slopes | None]:
    d_logprobs, d_entropy, _, d_topk = upstream
    lse_N, entropy_N, targets_N, topk_ids, temperature, *inputs = ctx.saved_tensors
    rule: LogitRule = ctx.request.rule if temperature is None else replace(ctx.request.rule, temperature=temperature)
    if d_logprobs is None and d_entropy is None and d_topk is None:
        return inputs, rule, None
    ids_NP = _pick_ids(targets_N, topk_ids if d_topk is not None else None)
    of_logprobs = torch.zeros_like(lse_N) if d_logprobs is None else d_logprobs.to(lse_N.dtype)
    slope = rule.slope()
    of_picks = of_logprobs[:, None] if d_topk is None else torch.cat([of_logprobs[:, None], d_topk], dim=1)
    of_picks = of_picks * (slope[:, None] if isinstance(slope, Tensor) else slope)
    of_all, of_entropy = -of_picks.sum(1), None
    if d_entropy is not None:
        of_entropy = -d_entropy * slope
        of_all = of_all + of_entropy * entropy_N
    return inputs, rule, _Slopes(lse_N, ids_NP, of_picks, of_all, of_entropy)


def _pick_ids(targets_N: Tensor, more_NK: Tensor | None) -> Tensor:
    ids = targets_N.long()[:, None]
    return ids if more_NK is None else torch.cat([ids, more_NK.long()], dim=1)


def _local(ids: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Ids counted from the slice's start, held inside it, and which of them really are inside."""
    is_here = (ids >= vocab.start) & (ids < vocab.stop)
    return (ids - vocab.start).clamp_(0, vocab.stop - vocab.start - 1), is_here


def _logprobs(logits_NP: Tensor, lse_N: Tensor) -> Tensor:
    logprobs = logits_NP - lse_N[:, None]
    return logprobs.masked_fill_(logits_NP < _MASKED, -torch.inf)


def _select(rule: LogitRule, rows: Tensor) -> LogitRule:
    if isinstance(rule.temperature, Tensor):
        return replace(rule, temperature=rule.temperature[rows])
    return rule
