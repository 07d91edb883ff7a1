"""Logits one tile at a time: some tokens by some of the vocabulary, in buffers that every tile uses again.

A tile is small enough to stay in a CPU's cache, so that the passes over it cost little beside the matrix products.
Both passes walk the vocabulary outside and the tokens inside: then a slice of the weight's gradient is finished before
the next begins, and is rounded to the weight's dtype once, without a second copy of it in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FLOOR", "Buffers", "LogitRule", "Tiling"]

FLOOR = -1e30
"""Stands for a logit of minus infinity: its probability is 0 as well, and no product of it is NaN."""

_CPU_TOKENS, _CPU_TILE = 1024, 1 << 21  # elements; 8 MiB in float32, a share of the last cache
_GPU_TOKENS, _GPU_TILE = 8192, 1 << 26
_MIN_VOCAB = 256  # narrower products waste a matrix unit


@dataclass(frozen=True, slots=True)
class Tiling:
    """How `[N, V]` is cut.

    Attributes:
        num_tokens: N.
        vocab_size: V.
        tokens: tokens of a tile at most.
        vocab: vocabulary entries of a tile at most.
    """

    num_tokens: int
    vocab_size: int
    tokens: int
    vocab: int

    @staticmethod
    def of(num_tokens: int, vocab_size: int, device: torch.device, chunk_tokens: int | None = None) -> "Tiling":
        """Tiles of one size as far as possible, since a narrow last one would cost as much as a full one."""
        tokens, elements = (_CPU_TOKENS, _CPU_TILE) if device.type == "cpu" else (_GPU_TOKENS, _GPU_TILE)
        tokens = max(1, min(num_tokens, chunk_tokens or tokens))
        tokens = -(-num_tokens // -(-num_tokens // tokens)) if num_tokens else 1
        vocab = min(vocab_size, max(_MIN_VOCAB, elements // tokens))
        vocab = -(-vocab_size // -(-vocab_size // vocab))
        return Tiling(num_tokens, vocab_size, tokens, min(vocab_size, -(-vocab // 64) * 64))

    @property
    def has_one_row(self) -> bool:
        """Whether a tile holds all tokens."""
        return self.tokens >= self.num_tokens

    def vocab_slices(self) -> Iterator[slice]:
        """The vocabulary, in order."""
        return _slices(self.vocab_size, self.vocab)

    def token_slices(self) -> Iterator[slice]:
        """The tokens, in order."""
        return _slices(self.num_tokens, self.tokens)


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What is done to the head's product, in this order.

    Attributes:
        logit_scale: multiplies; None does nothing.
        softcap: bounds by tanh; None does nothing.
        temperature: divides; a scalar or [N]; None does nothing.
    """

    logit_scale: float | None = None
    softcap: float | None = None
    temperature: float | Tensor | None = None

    def apply_(self, z: Tensor, rows: slice, tanh: Tensor | None) -> Tensor:
        """In place; `tanh`, where given, receives what the soft-cap's derivative is made of."""
        if self.logit_scale is not None:
            z.mul_(self.logit_scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_()
            if tanh is not None:
                tanh.copy_(z)
            z.mul_(self.softcap)
        if self.temperature is not None:
            z.div_(self.temperature[rows, None] if isinstance(self.temperature, Tensor) else self.temperature)
        return z

    def slope(self) -> float | Tensor:
        """The constant part of d(logit) / d(product): a scalar or [N]; the soft-cap's part is `1 - tanh ** 2`."""
        scale = 1.0 if self.logit_scale is None else self.logit_scale
        return scale if self.temperature is None else scale / self.temperature


class Buffers:
    """Memory for tiles by name, each taken at its first use and shaped anew for every tile.

    Args:
        tiling: the cut.
        dtype: of the elements.
        device: where they are.
    """

    def __init__(self, tiling: Tiling, dtype: torch.dtype, device: torch.device) -> None:
        self._elements, self._dtype, self._device = tiling.tokens * tiling.vocab, dtype, device
        self._flat: dict[str, Tensor] = {}

    def tile(self, name: str, rows: slice, vocab: slice) -> Tensor:
        """[tokens, vocab], contiguous, whatever it holds."""
        if name not in self._flat:
            self._flat[name] = torch.empty(self._elements, dtype=self._dtype, device=self._device)
        shape = (rows.stop - rows.start, vocab.stop - vocab.start)
        return self._flat[name][: shape[0] * shape[1]].view(shape)


def _slices(stop: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, stop)) for start in range(0, stop, step))
