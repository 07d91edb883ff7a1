"""Requests that no backend can answer, refused before the first token."""

from collections.abc import Sequence

import torch

from ebbtide.errors import RolloutError, problem
from ebbtide.types import GenerateRequest

__all__ = ["check_requests"]


def check_requests(
    requests: Sequence[GenerateRequest], *, context_tokens: int, vocab_size: int, has_tokenizer: bool
) -> None:
    """Refuse what cannot be answered.

    Args:
        requests: of one call.
        context_tokens: longest prompt and completion together.
        vocab_size: ids are below it.
        has_tokenizer: whether stop strings can be found.

    Raises:
        RolloutError: an id twice; a prompt that is empty, too long, or not of the vocabulary; stop strings without a
            tokenizer; a prefix that leaves nothing to draw.
    """
    ids: set[int] = set()
    for request in requests:
        where = f"requests[{request.request_id}]"
        if request.request_id in ids:
            raise RolloutError(problem("request_id", request.request_id, "two requests have it", "Number them apart"))
        ids.add(request.request_id)
        P = request.prompt_ids.shape[0]
        if not 0 < P < context_tokens:
            rule = f"a prompt needs at least 1 token and must leave room in the context of {context_tokens}"
            raise RolloutError(problem(f"{where}.prompt_ids", P, rule, "Shorten the prompt"))
        if request.sampling.stop and not has_tokenizer:
            raise RolloutError(problem("sampling.stop", request.sampling.stop, "stop strings need a tokenizer"))
        _check_prefix(request, where, context_tokens - P)
    _check_vocabulary(requests, vocab_size)


def _check_prefix(request: GenerateRequest, where: str, room: int) -> None:
    limit = min(request.sampling.max_tokens, room)
    if request.prefix is not None and request.prefix.token_ids.shape[0] >= limit:
        rule = f"the request may draw {limit} tokens, and its prefix has as many"
        remedy = "It has ended: take its prefix as the completion"
        raise RolloutError(problem(f"{where}.prefix", request.prefix.token_ids.shape[0], rule, remedy))


def _check_vocabulary(requests: Sequence[GenerateRequest], vocab_size: int) -> None:
    """An id beyond it would end a whole device by an assertion there."""
    distinct = {id(request.prompt_ids): request.prompt_ids for request in requests}
    parts = [*distinct.values(), *(request.prefix.token_ids for request in requests if request.prefix is not None)]
    if not parts:
        return
    low, high = (int(value) for value in torch.cat(parts).aminmax())
    if low < 0 or high >= vocab_size:
        rule = f"must be from 0 to {vocab_size - 1}, the vocabulary"
        raise RolloutError(problem("prompt_ids", low if low < 0 else high, rule, "Is the tokenizer the model's?"))
