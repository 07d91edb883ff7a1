"""FSDP2 over a policy: what is sharded together, in which dtypes, and how its gradients are summed."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from ebbtide.numerics.logprobs import TokenStats

__all__ = ["WeightsInForward", "fsdp_modules", "gathered", "num_shards", "release", "shard"]

# FSDP2 finds the tensors in a module's result through pytrees, and hangs its backward on them.
_pytree.register_pytree_node(
    TokenStats,
    lambda stats: ([stats.logprobs, stats.entropy, stats.topk_ids, stats.topk_logprobs], None),
    lambda parts, _: TokenStats(*parts),
    serialized_type_name="ebbtide.TokenStats",
)

# Gathering a weight that is divided over two axes takes two steps, one after the other: nothing to warn of.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def shard(policy: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, compute: torch.dtype, *, reshard: bool) -> None:
    """Shard each layer's weights, and the rest together, over the mesh; the weights' own dtype is what is stored.

    Args:
        policy: becomes an `FSDPModule`; its answers keep their dtype.
        layers: of the policy, each gathered and freed alone.
        mesh: one axis, or (replicate, shard).
        compute: dtype of gathered weights; gradients are reduced in float32.
        reshard: free a layer's gathered weights after its forward; its backward gathers them again.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in fsdp_modules(policy):
        # A loss is divided by counts of the global batch, so gradients are summed; gloo has no premultiplied sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(policy: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are sharded together."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def release(policy: nn.Module) -> None:
    """Give the memory of all weights back, whoever still holds the module; nothing can be computed with it any more."""
    shards = [weight.to_local() for weight in policy.parameters() if isinstance(weight, DTensor)]
    policy.to("meta")
    for part in shards:  # FSDP2 keeps its shards where a module has moved to the meta device
        part.untyped_storage().resize_(0)


def num_shards(weight: Tensor) -> int:
    """Among how many ranks the weight is divided; 1 where each has all of it."""
    if not isinstance(weight, DTensor):
        return 1
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def gathered(weight: Tensor, device: torch.device) -> Tensor:
    """A weight whole, on the device, without a graph; every rank must ask for it.

    A weight that is not sharded is given as it is, not as a copy.
    """
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return weight.to(device)
    local = weight.to_local()
    if local.device != device:  # an offloaded shard, which the collectives of an accelerator cannot take
        weight = DTensor.from_local(
            local.to(device), weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
    return weight.full_tensor()


class WeightsInForward:
    """Notes the weights as a forward sees them: gathered ones are other tensors than the sharded ones.

    Attributes:
        by_name: each weight of the module, as its latest forward saw it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.by_name: dict[str, nn.Parameter] = dict(module.named_parameters())
        self._handles = [
            part.register_forward_pre_hook(self._note(f"{prefix}." if prefix else ""))
            for prefix, part in module.named_modules()
        ]

    def _note(self, prefix: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, _: Any) -> None:
            # With all that is below: a head's weight is used without its module being called.
            self.by_name.update((prefix + name, item) for name, item in module.named_parameters())

        return hook

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that require grad, under the names of the model within a policy."""
        return ((name.removeprefix("model."), item) for name, item in self.by_name.items() if item.requires_grad)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.by_name.clear()
