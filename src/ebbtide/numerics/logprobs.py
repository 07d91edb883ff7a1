"""Log-probs, entropy and top-k of the next token from hidden states, without `[N, V]` logits.

`token_stats` is what a policy calls. A problem that fits one tile takes torch's own operators, which are faster there;
a larger one goes tile by tile (`chunked.py`). `eager_token_stats` serves models whose logits cannot be avoided.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ebbtide.errors import DataError, problem
from ebbtide.numerics.chunked import Request, given_stats, head_stats
from ebbtide.numerics.temperature import is_readable, read_temperature, scale_logits
from ebbtide.numerics.tiles import FLOOR, LogitRule

__all__ = ["Head", "TokenStats", "eager_token_stats", "token_stats"]

_SMALL = 1 << 20  # elements of [N, V] up to which it is made: 4 MiB in float32, half a tile

_P = ParamSpec("_P")
_R = TypeVar("_R")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Head:
    """What turns hidden states into logits: `hidden @ weight.T + bias`, times `logit_scale`, then soft-capped.

    Attributes:
        weight: [V, D]; may be the embedding's own (tied), may be frozen.
        bias: [V], or None. Minus infinity masks a token.
        softcap: logits become `softcap * tanh(logits / softcap)`, as in Gemma; None switches it off.
        logit_scale: multiplies the logits, as in Cohere; None switches it off.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float | None = None


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What is known of N next-token distributions, under the temperature.

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


def _uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A compiler that meets the function calls it as it is, instead of unrolling hundreds of tiles into one graph."""
    plain: Callable[_P, _R] = torch.compiler.disable(function)
    return plain


@_uncompiled
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
    """Log-probs of `targets_N`, and what else is asked for, differentiable in hidden states, weight and bias.

    Beside its results it holds one or two tiles of some MiB, and in the backward the gradients themselves (the hidden
    states' in float32). What is kept for the backward is a few numbers a token: logits are computed again there.

    Args:
        hidden_ND: [N, D] the hidden states whose next token is wanted. In float32 over a bfloat16 head they make the
            products float32 too.
        head: what makes logits of them.
        targets_N: [N] integer ids.
        temperature: above 0; a host scalar of 1 is no work at all; a tensor has one value or N.
        want_entropy: whether to compute the entropy.
        entropy_grad: whether it is differentiable, which costs another tile.
        top_k: how many of the likeliest tokens to report, 0 for none.
        candidate_ids_NK: [N, K] ids to report instead.
        chunk_tokens: tokens whose logits exist at one time, at most; None leaves it to the device.

    Raises:
        DataError: shapes that do not fit, an id outside the vocabulary, a temperature that is not above 0, a top-k
            larger than V. Ids and temperatures on a device are not read; there such an id gives NaN.

    Example:
        >>> hidden = torch.tensor([[1.0, 0.0]])
        >>> head = Head(torch.tensor([[0.0, 0.0], [1.0986123, 0.0]]))  # logits 0 and log(3)
        >>> token_stats(hidden, head, torch.tensor([1])).logprobs.exp()
        tensor([0.7500])
    """
    hidden_ND, weight_VD, bias_V = _product_dtypes(hidden_ND, head)
    (N, _), V = hidden_ND.shape, weight_VD.shape[0]
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    rule = LogitRule(head.logit_scale, head.softcap, read_temperature(temperature, N, dtype))
    _check_asked(hidden_ND, V, targets_N, top_k, candidate_ids_NK, chunk_tokens)
    request = Request(targets_N, rule, dtype, want_entropy, entropy_grad, candidate_ids_NK, top_k, chunk_tokens)
    if N * V <= _SMALL and weight_VD.dtype == hidden_ND.dtype and (hidden_ND.dtype == dtype or not hidden_ND.is_cuda):
        return _plain_stats(functional.linear(hidden_ND, weight_VD, bias_V), request)
    return TokenStats(*head_stats(hidden_ND, weight_VD, bias_V, request))


@_uncompiled
def eager_token_stats(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    want_entropy: bool = False,
    entropy_grad: bool = True,
    top_k: int = 0,
    candidate_ids_NK: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> TokenStats:
    """The same from logits, for a model that hands out nothing else; says so once, since they cost memory.

    The logits are read and never written, so it does not matter how the model made them. Beside them and their gradient
    only tiles are held: neither a scaled copy, nor one in float32, nor log-probs of the whole vocabulary.

    Args:
        logits_NV: [N, V] as the model returns them, in any float dtype.
        targets_N: as in `token_stats`, like all that follow.
        temperature: as there.
        want_entropy: as there.
        entropy_grad: as there.
        top_k: as there.
        candidate_ids_NK: as there.
        chunk_tokens: as there.

    Raises:
        DataError: as in `token_stats`.
    """
    _say_eager()
    if logits_NV.ndim != 2:
        raise DataError(problem("logits.shape", tuple(logits_NV.shape), "must be [N, V]"))
    N, V = logits_NV.shape
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    rule = LogitRule(temperature=read_temperature(temperature, N, dtype))
    _check_asked(logits_NV, V, targets_N, top_k, candidate_ids_NK, chunk_tokens)
    request = Request(targets_N, rule, dtype, want_entropy, entropy_grad, candidate_ids_NK, top_k, chunk_tokens)
    if N * V <= _SMALL:
        return _plain_stats(logits_NV.clone() if rule.temperature is not None else logits_NV, request)
    return TokenStats(*given_stats(logits_NV, request))


def _plain_stats(raw_NV: Tensor, request: Request) -> TokenStats:
    """By torch's operators, from raw logits that are given up."""
    rule = request.rule
    logits_NV = raw_NV.to(request.dtype)
    if rule.logit_scale is not None:
        logits_NV = logits_NV * rule.logit_scale
    if rule.softcap is not None:
        logits_NV = torch.tanh(logits_NV / rule.softcap) * rule.softcap
    all_NV = functional.log_softmax(scale_logits(logits_NV, rule.temperature), dim=-1)
    logprobs_N = all_NV.gather(1, request.targets.long()[:, None]).squeeze(1)
    entropy_N, ids, topk_logprobs = None, None, None
    if request.want_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and request.entropy_grad):
            entropy_N = -(all_NV.exp() * all_NV.clamp(min=FLOOR)).sum(-1)
    if request.candidates is not None:
        ids = request.candidates.to(torch.int32)
        topk_logprobs = all_NV.gather(1, request.candidates.long())
    elif request.top_k:
        topk_logprobs, ids = all_NV.topk(request.top_k, dim=-1)
        ids = ids.to(torch.int32)
    return TokenStats(logprobs_N, entropy_N, ids, topk_logprobs)


def _product_dtypes(hidden_ND: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias as the product wants them: what autocast says, else the wider of the two."""
    weight_VD, bias_V = head.weight, head.bias
    if hidden_ND.device != weight_VD.device:
        devices = (str(hidden_ND.device), str(weight_VD.device))
        raise DataError(problem("hidden.device, head.weight.device", devices, "must be one device"))
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        shapes = (tuple(hidden_ND.shape), tuple(weight_VD.shape))
        raise DataError(problem("hidden.shape, head.weight.shape", shapes, "must be [N, D] and [V, D]"))
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise DataError(problem("head.bias.shape", tuple(bias_V.shape), f"must be [{weight_VD.shape[0]}]"))
    for name, value in (("softcap", head.softcap), ("logit_scale", head.logit_scale)):
        if value is not None and not 0 < value < math.inf:
            remedy = "None switches it off"
            raise DataError(problem(f"head.{name}", value, "must be finite and above 0", remedy))
    if torch.is_autocast_enabled(hidden_ND.device.type) and hidden_ND.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
        return hidden_ND.to(dtype), weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
    return hidden_ND.to(torch.promote_types(hidden_ND.dtype, weight_VD.dtype)), weight_VD, bias_V


def _check_asked(
    like: Tensor, V: int, targets_N: Tensor, top_k: int, candidate_ids_NK: Tensor | None, chunk_tokens: int | None
) -> None:
    N = like.shape[0]
    for name, ids in (("targets", targets_N), ("candidate_ids", candidate_ids_NK)):
        if ids is not None and ids.device != like.device:
            rule = f"must be on {like.device}, where the model's output is"
            raise DataError(problem(f"{name}.device", str(ids.device), rule))
    if targets_N.shape != (N,):
        raise DataError(problem("targets.shape", tuple(targets_N.shape), f"must be [{N}], one id a hidden state"))
    if not 0 <= top_k <= V:
        raise DataError(problem("top_k", top_k, f"must be from 0 to the vocabulary's {V}", "0 asks for none"))
    if chunk_tokens is not None and chunk_tokens < 1:
        raise DataError(problem("chunk_tokens", chunk_tokens, "must be at least 1", "None leaves it to the device"))
    _check_ids("targets", targets_N, V)
    if candidate_ids_NK is None:
        return
    if top_k:
        rule = "the candidates are given, so the likeliest tokens cannot be asked for as well"
        raise DataError(problem("top_k", top_k, rule, "Set it to 0"))
    if candidate_ids_NK.ndim != 2 or candidate_ids_NK.shape[0] != N:
        raise DataError(problem("candidate_ids.shape", tuple(candidate_ids_NK.shape), f"must be [{N}, K]"))
    _check_ids("candidate_ids", candidate_ids_NK, V)


def _check_ids(name: str, ids: Tensor, V: int) -> None:
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise DataError(problem(f"{name}.dtype", ids.dtype, "must be an integer type"))
    if ids.numel() == 0 or not is_readable(ids):
        return
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 or high >= V:
        remedy = "Check that the tokenizer is the model's"
        raise DataError(problem(name, low if low < 0 else high, f"must be from 0 to {V - 1}, the vocabulary", remedy))


@cache
def _say_eager() -> None:
    _log.warning(
        "log-probs are computed from whole logits, since this model's head cannot be split from its backbone: "
        "their [N, V] and their gradient's are in memory"
    )
