"""Where tiles of logits come from and where their gradient goes: a head and hidden states, or logits that exist."""

from typing import Protocol

import torch
from torch import Tensor

from ebbtide.numerics.products import add_product, is_worth_onednn, onednn_product, product_into
from ebbtide.numerics.tiles import FLOOR, Buffers, LogitRule, Tiling

__all__ = ["GivenLogits", "HeadLogits", "LogitSource"]


class LogitSource(Protocol):
    """What a pass over the tiles asks for: first `enter` a slice of the vocabulary, then its tiles, token by token."""

    @property
    def tiling(self) -> Tiling:
        """The cut."""
        ...

    def enter(self, vocab: slice) -> None:
        """Begin a slice of the vocabulary."""
        ...

    def logits(self, buffers: Buffers, rows: slice, vocab: slice, tanh: Tensor | None = None) -> Tensor:
        """[tokens, vocab], never below FLOOR, the caller's to overwrite until the next call; fills `tanh` where given.

        They are in the buffer "logits", or in memory that a product has returned.
        """
        ...

    def accept(self, grad: Tensor, rows: slice, vocab: slice) -> None:
        """Take a tile of the gradient by the raw product; `grad` is the caller's again afterwards."""
        ...


class HeadLogits:
    """Logits from hidden states [N, D] and a head's weight [V, D].

    Products of half precision accumulate in float32. On CUDA they are also returned in float32; the CPU's matrix
    product rounds what it returns, so there a logit of a bfloat16 head carries bfloat16's error unless the hidden
    states come in float32. All that follows is float32 on both.

    Attributes:
        d_hidden: [N, D] in the arithmetic's dtype, complete after the last tile; None unless wanted.
        d_weight: [V, D] in the weight's dtype, likewise.
        d_bias: [V] in the bias's dtype, likewise.
    """

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        rule: LogitRule,
        tiling: Tiling,
        *,
        dtype: torch.dtype,
        wanted: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        self.tiling = tiling
        self._hidden, self._weight, self._bias, self._rule = hidden_ND, weight_VD, bias_V, rule
        # Half precision: the CPU returns logits rounded to it, and a tile of the gradient is a factor in it everywhere.
        self._is_narrow = hidden_ND.dtype != dtype
        self._narrow = Buffers(tiling, hidden_ND.dtype, hidden_ND.device)
        # The first tile overwrites; without tokens there is none.
        make = torch.empty_like if tiling.num_tokens else torch.zeros_like
        self.d_hidden = make(hidden_ND, dtype=dtype) if wanted[0] else None
        self.d_weight = make(weight_VD) if wanted[1] else None
        self.d_bias = make(bias_V) if wanted[2] and bias_V is not None else None
        self._dtype = dtype
        self._onednn = is_worth_onednn(hidden_ND, 2 * hidden_ND.numel() * weight_VD.shape[0])
        self._sum_VD: Tensor | None = None
        if wanted[1] and weight_VD.dtype != dtype and not (tiling.has_one_row and weight_VD.dtype == hidden_ND.dtype):
            self._sum_VD = weight_VD.new_empty((tiling.vocab, weight_VD.shape[1]), dtype=dtype)
        self._sum_V = weight_VD.new_empty(tiling.vocab, dtype=dtype) if self.d_bias is not None else None

    def enter(self, vocab: slice) -> None:
        """Take the slice of the weight, in the dtype of the product."""
        self._weight_vD = self._weight[vocab].to(self._hidden.dtype)
        if self._bias is not None:
            self._bias_v = self._bias[vocab].to(self._dtype).clamp(min=FLOOR)

    def logits(self, buffers: Buffers, rows: slice, vocab: slice, tanh: Tensor | None = None) -> Tensor:
        """One product, and what the rule does to it."""
        if self._onednn:
            z = onednn_product(self._hidden[rows], self._weight_vD.t())
        else:
            narrow = self._narrow.tile("product", rows, vocab) if self._is_narrow and not self._hidden.is_cuda else None
            z = product_into(
                buffers.tile("logits", rows, vocab), self._hidden[rows], self._weight_vD.t(), narrow=narrow
            )
        if self._bias is not None:
            z.add_(self._bias_v)
        return self._rule.apply_(z, rows, tanh)

    def accept(self, grad: Tensor, rows: slice, vocab: slice) -> None:
        """Two products: one adds to the hidden states' gradient, one to the slice of the weight's."""
        if self._sum_V is not None and self.d_bias is not None:
            sum_v = self._sum_V[: grad.shape[1]]
            _add(sum_v, grad.sum(0), is_first=rows.start == 0)
            if rows.stop == self.tiling.num_tokens:
                self.d_bias[vocab] = sum_v
        if self._is_narrow:
            grad = self._narrow.tile("product", rows, vocab).copy_(grad)
        if self.d_hidden is not None:
            add_product(self.d_hidden[rows], grad, self._weight_vD, is_first=vocab.start == 0, onednn=self._onednn)
        if self.d_weight is not None:
            sum_vD = self.d_weight[vocab] if self._sum_VD is None else self._sum_VD[: grad.shape[1]]
            add_product(sum_vD, grad.t(), self._hidden[rows], is_first=rows.start == 0, onednn=self._onednn)
            if self._sum_VD is not None and rows.stop == self.tiling.num_tokens:
                self.d_weight[vocab] = sum_vD


class GivenLogits:
    """Logits [N, V] that a model has made; they are read, never written.

    Attributes:
        d_logits: [N, V] in the logits' dtype, complete after the last tile; None unless wanted.
    """

    def __init__(self, logits_NV: Tensor, rule: LogitRule, tiling: Tiling, *, is_wanted: bool = False) -> None:
        self.tiling = tiling
        self._logits, self._rule = logits_NV, rule
        self.d_logits = torch.empty_like(logits_NV) if is_wanted else None

    def enter(self, vocab: slice) -> None:
        """Nothing to prepare."""

    def logits(self, buffers: Buffers, rows: slice, vocab: slice, tanh: Tensor | None = None) -> Tensor:
        """A copy, which is also the cast."""
        z = buffers.tile("logits", rows, vocab).copy_(self._logits[rows, vocab]).clamp_(min=FLOOR)
        return self._rule.apply_(z, rows, tanh)

    def accept(self, grad: Tensor, rows: slice, vocab: slice) -> None:
        """Put it where it belongs."""
        if self.d_logits is not None:
            self.d_logits[rows, vocab] = grad


def _add(total: Tensor, part: Tensor, *, is_first: bool) -> None:
    if is_first:
        total.copy_(part)
    else:
        total.add_(part)
