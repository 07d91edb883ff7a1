"""A transformers model whose weights come by name, are shared or owned, and can be dropped while its buffers stay."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.errors import WeightSyncError, problem
from ebbtide.models.build import build_shell
from ebbtide.weightsync.base import NamedTensor

__all__ = ["LoadedModel"]


class LoadedModel:
    """A model for generation.

    Attributes:
        model: without weights until the first push.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.model = build_shell(config, dtype=dtype)
        self._dtype = dtype
        self._device = device
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._names = dict.fromkeys(name for name, _ in self.model.named_parameters())  # a tied weight has one name
        self._names.update(dict.fromkeys(name for name, _ in _stored_buffers(self.model)))
        self._missing: set[str] = set()
        self._owned: set[str] = set()

    def begin(self) -> None:
        """A push begins: every weight is wanted."""
        self._missing = set(self._names)

    @torch.no_grad()
    def load(self, weights: Sequence[NamedTensor], *, may_share: bool) -> None:
        """Take some weights.

        Args:
            weights: names and tensors.
            may_share: keep tensors themselves where dtype and device allow; else everything is copied.

        Raises:
            WeightSyncError: a name or shape that the model does not have.
        """
        for name, tensor in weights:
            owner, leaf, old = self._find(name, tensor)
            is_parameter = leaf in owner._parameters
            fits = tensor.device == self._device and (tensor.dtype == self._dtype or not tensor.is_floating_point())
            if not is_parameter:
                old.copy_(tensor)
            elif fits and may_share:
                owner._parameters[leaf] = nn.Parameter(tensor.detach(), requires_grad=False)
                self._owned.discard(name)
            elif name in self._owned and old.device == self._device:
                old.copy_(tensor)
            else:
                copy = torch.empty(tensor.shape, dtype=self._dtype, device=self._device).copy_(tensor)
                owner._parameters[leaf] = nn.Parameter(copy, requires_grad=False)
                self._owned.add(name)
            self._missing.discard(name)

    def finish(self, version: int) -> None:
        """The push is over.

        Raises:
            WeightSyncError: weights did not come.
        """
        if self._missing:
            rule = f"the push of version {version} lacked {len(self._missing)} weights"
            remedy = "Push all of named_weights()"
            raise WeightSyncError(problem("rollout.weights", sorted(self._missing)[:3], rule, remedy))
        self.model.tie_weights()

    def drop(self) -> None:
        """Let go of all weights; buffers stay."""
        for module, leaf, parameter in _parameters(self.model):
            module._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        self._owned.clear()

    def move_owned(self, device: torch.device) -> None:
        """Bring copies to a device; what is shared is not this model's to move."""
        for name in self._owned:
            owner_name, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(owner_name)
            owner._parameters[leaf] = nn.Parameter(owner.get_parameter(leaf).to(device), requires_grad=False)
        if self._owned:
            self.model.tie_weights()

    def _find(self, name: str, tensor: Tensor) -> tuple[nn.Module, str, Tensor]:
        owner_name, _, leaf = name.rpartition(".")
        try:
            owner = self.model.get_submodule(owner_name)
        except AttributeError:
            owner = nn.Module()
        old = owner._parameters.get(leaf)
        if old is None:
            old = owner._buffers.get(leaf)
        if old is None or old.shape != tensor.shape:
            rule = f"the model has {'no such weight' if old is None else f'shape {tuple(old.shape)} there'}"
            raise WeightSyncError(problem(f"rollout.weights.{name}", tuple(tensor.shape), rule))
        return owner, leaf, old


def _stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint has, such as the bias of a router; computed ones are not among them."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
