"""Drawing a token from logits, each row by its own parameters and its own random numbers.

A draw depends on the request's seed and the token's number alone, so the same seed gives the same tokens whatever
else is in the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.types import SamplingParams

__all__ = ["RowSampling", "uniform"]


class RowSampling:
    """Sampling parameters of B rows as tensors, with what is neutral for all rows skipped."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        def column(values: Sequence[float], neutral: float, dtype: torch.dtype) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        is_greedy = [item.temperature == 0 for item in params]
        self._all_greedy = all(is_greedy)
        self._greedy = torch.tensor(is_greedy, device=device) if any(is_greedy) else None
        temperatures = [1.0 if item.temperature == 0 else item.temperature for item in params]
        self._temperature = column(temperatures, 1.0, torch.float32)
        self._top_k = column([item.top_k for item in params], 0, torch.int64)
        self._top_p = column([item.top_p for item in params], 1.0, torch.float32)
        self._min_p = column([item.min_p for item in params], 0.0, torch.float32)

    def draw(self, logits_BV: Tensor, seeds: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] int64 and their log-probs [B] float32 under the truncated, tempered distribution.

        A greedy row's log-prob is that of the distribution at temperature 1 without truncation.

        Args:
            logits_BV: any float dtype.
            seeds: [B] int64, one a request.
            numbers: [B] int64, how many tokens the request has drawn before.
        """
        logits = logits_BV.float()
        if self._all_greedy:
            tokens = logits.argmax(-1)
            return tokens, _pick(logits, tokens) - logits.logsumexp(-1)
        kept = self._truncated(logits if self._temperature is None else logits / self._temperature)
        log_total = kept.logsumexp(-1, keepdim=True)
        cumulative = (kept - log_total).double().exp_().cumsum_(-1)
        level = uniform(seeds, numbers)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, level, right=True).squeeze(1)
        logprobs = _pick(kept, tokens) - log_total.squeeze(1)
        if self._greedy is None:
            return tokens, logprobs
        best = logits.argmax(-1)
        best_logprobs = _pick(logits, best) - logits.logsumexp(-1)
        return torch.where(self._greedy, best, tokens), torch.where(self._greedy, best_logprobs, logprobs)

    def _truncated(self, logits: Tensor) -> Tensor:
        if self._top_k is not None:
            limit = torch.where(self._top_k == 0, logits.shape[-1], self._top_k).clamp(max=logits.shape[-1])
            ordered = logits.topk(int(limit.max()), dim=-1).values
            logits = logits.masked_fill(logits < ordered.gather(-1, limit - 1), float("-inf"))
        if self._min_p is not None:
            floor = logits.amax(-1, keepdim=True) + self._min_p.log()
            logits = logits.masked_fill(logits < floor, float("-inf"))
        if self._top_p is not None:
            ordered, index = logits.sort(-1, descending=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities  # the likeliest token has 0 before it and always stays
            dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, index, before >= self._top_p)
            logits = logits.masked_fill(dropped, float("-inf"))
        return logits


def uniform(seeds: Tensor, numbers: Tensor) -> Tensor:
    """[B] float64 in [0, 1): a hash of seed and number, the same on every device.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), over seed + number * golden gamma.
    """
    mixed = seeds + (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _pick(values_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return values_BV.gather(-1, tokens_B[:, None]).squeeze(1)
