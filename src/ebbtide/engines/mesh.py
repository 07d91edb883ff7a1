"""Which rank does what: the axes pp, dp_replicate, dp_shard and tp over the ranks of torch.distributed.

An engine in a process without a process group is a world of one rank. Where a mesh is needed even there (weights are
stored in one dtype and computed with in another), it gets a group of one in this process, without a port or a file.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ebbtide.device import Device
from ebbtide.errors import ConfigError, problem

__all__ = ["AXES", "Axes", "Ranks"]

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The mesh's axes, the one whose ranks stand farthest apart first."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Ranks along each axis; their product is the world's size."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @staticmethod
    def over(world_size: int, *, pp: int = 1, dp_replicate: int = 1, tp: int = 1) -> "Axes":
        """The axes given, and all that is left as `dp_shard`.

        Raises:
            ConfigError: they do not divide the world.
        """
        given = pp * dp_replicate * tp
        if world_size % given:
            where = f"engine: {pp=}, {dp_replicate=}, {tp=}"
            rule = f"their product must divide the number of ranks, {world_size}"
            raise ConfigError(problem(where, given, rule, "What is left of the ranks shards the weights"))
        return Axes(pp, dp_replicate, world_size // given, tp)


class Ranks:
    """This rank's place among the ranks that train one model."""

    def __init__(self, device: Device, axes: Axes, *, needs_mesh: bool) -> None:
        """needs_mesh: make a mesh even for one rank."""
        self.axes = axes
        self.mesh: DeviceMesh | None = None
        self.device = device
        self._owns_group = False
        if needs_mesh or dist.is_initialized():
            self._owns_group = _join(device)
            sizes = tuple(getattr(axes, axis) for axis in AXES)
            self.mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)

    @staticmethod
    def world_size() -> int:
        """Ranks of this process's world."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return int(getattr(self.axes, axis))

    @property
    def num(self) -> int:
        """Ranks on all axes together."""
        return math.prod(getattr(self.axes, axis) for axis in AXES)

    def reduce(self, values: Tensor, *axes: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The values, on the device, reduced in place over the ranks along each axis."""
        for axis in axes:
            if self.mesh is not None and self.size(axis) > 1:
                dist.all_reduce(values, op, group=self.mesh.get_group(axis))
        return values

    def total(self, values: list[int], *axes: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[int]:
        """Host numbers, reduced likewise."""
        found = self.reduce(torch.tensor(values, device=self.device.torch), *axes, op=op)
        return [int(value) for value in found.tolist()]

    def share(self, tensor: Tensor, axis: str, source: int) -> Tensor:
        """The tensor of the rank with that index along the axis, on all of them; in place."""
        if self.mesh is not None and self.size(axis) > 1:
            dist.broadcast(tensor, group=self.mesh.get_group(axis), group_src=source)
        return tensor

    def gather(self, value: Any, axis: str) -> list[Any]:
        """A small value of each rank along the axis, in order."""
        if self.mesh is None or self.size(axis) == 1:
            return [value]
        values: list[Any] = [None] * self.size(axis)
        dist.all_gather_object(values, value, group=self.mesh.get_group(axis))
        return values

    def close(self) -> None:
        """End the group that was made for this engine alone."""
        self.mesh = None
        if self._owns_group:
            self._owns_group = False
            _leave()


_num_users = 0  # engines in this process that share the group of one


def _join(device: Device) -> bool:
    """Whether the process group is one that this module made."""
    global _num_users
    if dist.is_initialized() and not _num_users:
        return False
    if not _num_users:
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
    _num_users += 1
    return True


def _leave() -> None:
    global _num_users
    _num_users -= 1
    if not _num_users:
        dist.destroy_process_group()
