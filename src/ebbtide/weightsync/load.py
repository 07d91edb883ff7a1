"""A consumer for receivers: copies what arrives into tensors that are there already, slice by slice where it must."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ebbtide.errors import WeightSyncError, did_you_mean, problem
from ebbtide.weightsync.base import NamedTensor
from ebbtide.weightsync.buckets import flat_bytes

__all__ = ["CopyInto"]


class CopyInto:
    """Copies each weight into the tensor of its name, casting and moving where dtype or device differ.

    It takes slices, so that a weight larger than a bucket needs no second copy of itself, and keeps no view.

    Args:
        weights: by name, for example a model's `named_parameters`; written in place.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: tensor.detach() for name, tensor in weights.items()}

    def __call__(self, weights: Sequence[NamedTensor]) -> None:
        """Copy whole weights.

        Raises:
            WeightSyncError: no tensor of that name, or one of another shape.
        """
        for name, tensor in weights:
            _copy(self._target(name, tuple(tensor.shape)), tensor)

    def load_slice(self, name: str, shape: tuple[int, ...], start: int, piece: Tensor) -> None:
        """Copy elements `start` and on of a flattened weight."""
        target = self._target(name, shape)
        if target.is_contiguous():
            _copy(target.view(-1)[start : start + piece.numel()], piece)
        else:
            index = torch.arange(start, start + piece.numel(), device=target.device)
            target[torch.unravel_index(index, shape)] = piece.to(target.device, target.dtype)

    def _target(self, name: str, shape: tuple[int, ...]) -> Tensor:
        target = self._weights.get(name)
        if target is None:
            remedy = did_you_mean(name, list(self._weights))
            raise WeightSyncError(problem("weight", name, f"none of the {len(self._weights)} here", remedy))
        if tuple(target.shape) != shape:
            raise WeightSyncError(problem("weight", name, f"has shape {shape}, the one here {tuple(target.shape)}"))
        return target


_MIN_BYTES = 4096  # below this the detour over numpy costs more than it saves


def _copy(target: Tensor, source: Tensor) -> None:
    """One thread where plain bytes are moved: a team of torch's would fight the sender's copy for the cores."""
    on_host = target.device.type == source.device.type == "cpu"
    is_plain = on_host and target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    if is_plain and source.nbytes >= _MIN_BYTES:
        np.copyto(flat_bytes(target).numpy(), flat_bytes(source).numpy())
    else:
        target.copy_(source)
