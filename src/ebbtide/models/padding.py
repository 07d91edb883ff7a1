"""Packed rows laid side by side in padded blocks, and back, with gradients that are plain copies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["PaddedBlocks", "ranges", "similar"]


class PaddedBlocks:
    """Sequences of T packed rows as blocks [b, L, ...], each padded at the end to its longest.

    A pad repeats its sequence's last row; whoever uses the blocks must not let a pad matter, and then its gradient is
    exactly 0.
    """

    def __init__(self, lengths: Sequence[int], blocks: Sequence[Sequence[int]], device: torch.device) -> None:
        """lengths: of each sequence, all above 0. blocks: which sequences each block holds, every one exactly once."""
        self.shapes = [(len(block), max(lengths[b] for b in block)) for block in blocks]
        order = [b for block in blocks for b in block]
        num_slots = sum(size * length for size, length in self.shapes)
        self._is_identity = num_slots == sum(lengths) and order == sorted(order)
        if self._is_identity:
            return
        length_B = torch.tensor(lengths)
        start_B = (length_B.cumsum(0) - length_B)[order]
        padded_B = torch.tensor([length for size, length in self.shapes for _ in range(size)])
        within = ranges(torch.zeros_like(padded_B), padded_B)
        length_slot = torch.repeat_interleave(length_B[order], padded_B)
        gather = torch.repeat_interleave(start_B, padded_B) + torch.minimum(within, length_slot - 1)
        inside = (within < length_slot).nonzero().squeeze(1)
        scatter = torch.empty(int(length_B.sum()), dtype=torch.long)
        scatter[gather[inside]] = inside
        self._gather, self._scatter = gather.to(device), scatter.to(device)

    def split(self, rows: Tensor) -> list[Tensor]:
        """[T, ...] as one [b, L, ...] a block."""
        slots = rows if self._is_identity else _Pad.apply(rows, self._gather, self._scatter)  # type: ignore[no-untyped-call]
        parts = slots.split([size * length for size, length in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def merge(self, blocks: Sequence[Tensor]) -> Tensor:
        """One [b, L, ...] a block as [T, ...]."""
        flat = [block.flatten(0, 1) for block in blocks]
        slots = flat[0] if len(flat) == 1 else torch.cat(flat)
        merged: Tensor = slots if self._is_identity else _Unpad.apply(slots, self._scatter)  # type: ignore[no-untyped-call]
        return merged


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences grouped by length: a group goes down to three quarters of its longest, so padding stays below a third.

    Example:
        >>> similar([4, 9, 3, 8])
        [[1, 3], [0, 2]]
    """
    if len(set(lengths)) <= 1:
        return [list(range(len(lengths)))] if lengths else []
    groups: list[list[int]] = []
    longest = 0
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        if groups and 4 * lengths[b] >= 3 * longest:
            groups[-1].append(b)
        else:
            groups.append([b])
            longest = lengths[b]
    return [sorted(group) for group in groups]


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The numbers start, start + 1, ... of each range, end to end.

    Example:
        >>> ranges(torch.tensor([5, 1]), torch.tensor([2, 3])).tolist()
        [5, 6, 1, 2, 3]
    """
    first = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - first, lengths)


class _Pad(torch.autograd.Function):
    """Rows to slots. Pads receive a gradient of exactly 0, so the backward is a plain gather as well."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (scatter,) = ctx.saved_tensors
        return grads[0].index_select(0, scatter), None, None


class _Unpad(torch.autograd.Function):
    """Slots back to rows."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        ctx.num_slots = slots.shape[0]
        return slots.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (scatter,) = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.num_slots, *grads[0].shape[1:])
        return grad.index_copy_(0, scatter, grads[0].contiguous()), None
