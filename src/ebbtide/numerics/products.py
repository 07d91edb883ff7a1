"""Matrix products whose factors may be narrower than their sum, by the fastest kernel that gives the same numbers.

A float32 product on the CPU goes to oneDNN where that is built in: torch sends it to MKL, which on AMD processors
leaves the wide vector units idle and takes twice the time. Both accumulate in float32.
"""

import torch
from torch import Tensor

__all__ = ["add_product", "is_worth_onednn", "onednn_product", "product_into"]

_MIN_FLOPS = 1 << 29  # oneDNN compiles a kernel for each new shape, which takes a millisecond


def is_worth_onednn(like: Tensor, num_flops: int) -> bool:
    """Whether float32 products of this many operations in all are faster there."""
    if like.device.type != "cpu" or like.dtype != torch.float32 or num_flops < _MIN_FLOPS:
        return False
    is_there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_there and bool(torch.backends.mkldnn.enabled)


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` [m, n] float32, in memory of its own; transposed factors cost nothing."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def product_into(out: Tensor, a: Tensor, b: Tensor, *, narrow: Tensor | None = None) -> Tensor:
    """`out = a @ b`.

    Args:
        out: [m, n], in the dtype of the sum.
        a: [m, k].
        b: [k, n], in the dtype of `a`.
        narrow: [m, n] in the dtype of `a`, to round to where the CPU cannot return what it has summed.
    """
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(torch.mm(a, b) if narrow is None else torch.mm(a, b, out=narrow))


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool, onednn: bool) -> None:
    """`total += a @ b`; the first product overwrites, so that nobody need fill with zeros before."""
    if onednn:
        product = onednn_product(a, b)
        _ = total.copy_(product) if is_first else total.add_(product)
    elif is_first:
        product_into(total, a, b)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype) if a.is_cuda else torch.mm(a, b))
