"""Drawing a token from logits, each row by its own parameters and its own random numbers.

A draw depends on the request's seed and the token's number alone, so the same seed gives the same tokens whatever
else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.types import SamplingParams

__all__ = ["RowSampling", "streams", "uniform"]

_BLOCK = 64  # of the vocabulary: first a block is drawn, then a token in it, which spares a running sum over all


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of B rows, each column [B, 1]; None where all rows are neutral, which then costs nothing.

    Attributes:
        is_greedy: bool.
        temperature: float32; 1 where greedy.
        top_k: int64; 0 keeps all.
        top_p: float32; 1 keeps all.
        min_p: float32; 0 keeps all.
        all_greedy: whether every row is.
    """

    is_greedy: Tensor | None
    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    all_greedy: bool

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device) -> "RowSampling":
        """The columns of these rows."""
        kinds = set(params)

        def column(name: str, neutral: float, dtype: torch.dtype) -> Tensor | None:
            if all(getattr(kind, name) == neutral for kind in kinds):
                return None
            return torch.tensor([getattr(item, name) for item in params], dtype=dtype, device=device)[:, None]

        temperature = column("temperature", 1.0, torch.float32)
        is_greedy = None
        if temperature is not None and any(kind.temperature == 0 for kind in kinds):
            is_greedy = temperature == 0
            temperature = temperature.masked_fill(is_greedy, 1.0)
        return RowSampling(
            is_greedy,
            temperature,
            column("top_k", 0, torch.int64),
            column("top_p", 1.0, torch.float32),
            column("min_p", 0.0, torch.float32),
            all(kind.temperature == 0 for kind in kinds),
        )

    def rows(self, index: Tensor) -> "RowSampling":
        """The columns of some rows; index is [b] int64."""

        def chosen(column: Tensor | None) -> Tensor | None:
            return None if column is None else column.index_select(0, index)

        return RowSampling(
            chosen(self.is_greedy),
            chosen(self.temperature),
            chosen(self.top_k),
            chosen(self.top_p),
            chosen(self.min_p),
            self.all_greedy,
        )

    def draw(self, logits_BV: Tensor, streams_B: Tensor, numbers_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] int64 and their log-probs [B] float32 under the truncated, tempered distribution.

        A greedy row's log-prob is that of the distribution at temperature 1 without truncation. A row whose logits are
        not finite has log-prob NaN.

        Args:
            logits_BV: any float dtype.
            streams_B: [B] int64, `streams` of the requests' seeds.
            numbers_B: [B] int64, how many tokens the request has drawn before.
        """
        logits = logits_BV.float()
        if self.all_greedy:
            return _most_likely(logits)
        kept = self._truncated(logits if self.temperature is None else logits / self.temperature)
        tokens, logprobs = _weighted(kept, uniform(streams_B, numbers_B))
        if self.is_greedy is None:
            return tokens, logprobs
        best, best_logprobs = _most_likely(logits)
        is_greedy = self.is_greedy.squeeze(1)
        return torch.where(is_greedy, best, tokens), torch.where(is_greedy, best_logprobs, logprobs)

    def _truncated(self, logits: Tensor) -> Tensor:
        """Tokens as likely as the last one that top-k keeps stay; of equally likely ones top-p keeps the lower ids."""
        if self.top_k is not None:
            limit = torch.where(self.top_k == 0, logits.shape[-1], self.top_k).clamp(max=logits.shape[-1])
            ordered = logits.topk(int(limit.max()), dim=-1).values
            logits = logits.masked_fill(logits < ordered.gather(-1, limit - 1), float("-inf"))
        if self.min_p is not None:
            floor = logits.amax(-1, keepdim=True) + self.min_p.log()
            logits = logits.masked_fill(logits < floor, float("-inf"))
        if self.top_p is not None:
            ordered, index = logits.sort(stable=True, dim=-1, descending=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities  # the likeliest token has 0 before it and always stays
            is_beyond = (before >= self.top_p) & (self.top_p < 1)  # a sum may round to 1 before its end
            dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, index, is_beyond)
            logits = logits.masked_fill(dropped, float("-inf"))
        return logits


def streams(seeds: Tensor) -> Tensor:
    """[B] int64, where each seed's random numbers begin; near seeds begin far apart."""
    return _mixed(seeds)


def uniform(streams_B: Tensor, numbers_B: Tensor) -> Tensor:
    """[B] float64 in [0, 1): a hash of stream and number, the same on every device.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), over stream + number * golden gamma.
    """
    mixed = _mixed(streams_B + (numbers_B + 1) * _signed(0x9E3779B97F4A7C15))
    # 52 bits: the product of such a number with a total is below the total, whatever the rounding.
    return _shifted(mixed, 12).double() * 2.0**-52


def _mixed(value: Tensor) -> Tensor:
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    tokens = logits.argmax(-1)
    return tokens, _pick(logits, tokens) - logits.logsumexp(-1)


def _weighted(logits: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """A token by inverting the cumulative distribution at uniform_B, and its log-prob."""
    peak = logits.amax(-1, keepdim=True)
    if logits.shape[1] <= 4 * _BLOCK:
        up_to = (logits - peak).double().exp_().cumsum_(-1)
        total = up_to[:, -1:]
        tokens = torch.searchsorted(up_to, uniform_B[:, None] * total, right=True)
    else:
        tokens, total = _blockwise(logits, peak, uniform_B)
    tokens = tokens.squeeze(1).clamp_(max=logits.shape[1] - 1)  # beyond the last only where NaN
    return tokens, _pick(logits, tokens) - (peak + total.log().float()).squeeze(1)


def _blockwise(logits: Tensor, peak: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, 1], and the sum of exp(logits - peak) [B, 1] float64."""
    B, V = logits.shape
    num_blocks = -(-V // _BLOCK)
    weights = logits.new_zeros(B, num_blocks * _BLOCK)
    torch.sub(logits, peak, out=weights[:, :V])
    weights[:, :V].exp_()
    blocks = weights.view(B, num_blocks, _BLOCK)
    up_to = blocks.sum(-1).double().cumsum_(-1)
    level = uniform_B[:, None] * up_to[:, -1:]
    block = torch.searchsorted(up_to, level, right=True).clamp_(max=num_blocks - 1)
    before = up_to.gather(1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(B, 1, _BLOCK)).squeeze(1).double().cumsum_(-1)
    # The block's sum was rounded otherwise than the running sum inside it; the level must stay below the latter.
    below = torch.nextafter(inside[:, -1:], torch.zeros_like(level))
    within = torch.searchsorted(inside, torch.minimum(level - before, below), right=True)
    return block * _BLOCK + within, up_to[:, -1:]


def _pick(values_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return values_BV.gather(-1, tokens_B[:, None]).squeeze(1)
