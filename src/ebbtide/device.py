"""cpu, cuda and npu behind one face: synchronise, give memory back, read memory.

`Device` is what the rest of ebbtide sees; nothing else calls `torch.cuda` or `torch.npu`.
"""

import importlib
import importlib.util
import os
import re
import resource
from dataclasses import dataclass
from types import ModuleType

import torch

from ebbtide.errors import ConfigError, MissingExtraError, problem

__all__ = ["Device", "DeviceMemory", "HostMemory", "available", "host_memory", "reset_host_peak"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device's caching allocator holds, in bytes; all 0 on the CPU, which has none."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the kernel counts for this process, in bytes."""

    rss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this process.

    Attributes:
        type: "cpu", "cuda" or "npu".
        index: its number within this process; 0 on the CPU.
    """

    type: str
    index: int = 0

    @staticmethod
    def of(name: str, index: int = 0) -> "Device":
        """The device that a recipe names; "auto" takes the first kind of accelerator that is there, else the CPU.

        Raises:
            ConfigError: unknown name, or no such device on this machine.
            MissingExtraError: "npu" without its package.
        """
        if name == "auto":
            return Device(available()[0], index)
        if name not in ("cpu", "cuda", "npu"):
            raise ConfigError(problem("device", name, "must be one of auto, cpu, cuda, npu"))
        if name == "npu" and importlib.util.find_spec("torch_npu") is None:
            raise MissingExtraError(problem("device", name, "needs torch_npu", "pip install torch_npu"))
        if name not in available():
            here = ", ".join(available())
            raise ConfigError(problem("device", name, f"this machine has: {here}", "Use device = 'auto'"))
        return Device(name, index)

    @property
    def torch(self) -> torch.device:
        """As torch names it."""
        return torch.device(self.type) if self.type == "cpu" else torch.device(self.type, self.index)

    @property
    def backend(self) -> str:
        """The torch.distributed backend that moves this device's tensors."""
        return {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[self.type]

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        if module := self._module():
            module.synchronize(self.index)

    def empty_cache(self) -> None:
        """Hand unused cached blocks back to the driver; live tensors stay."""
        if module := self._module():
            module.empty_cache()

    def memory(self) -> DeviceMemory:
        """What the allocator holds now, and the peaks since `reset_peak`."""
        module = self._module()
        if module is None:
            return DeviceMemory(0, 0, 0, 0)
        return DeviceMemory(
            module.memory_allocated(self.index),
            module.memory_reserved(self.index),
            module.max_memory_allocated(self.index),
            module.max_memory_reserved(self.index),
        )

    def reset_peak(self) -> None:
        """Start new peaks at what is held now."""
        if module := self._module():
            module.reset_peak_memory_stats(self.index)

    def _module(self) -> ModuleType | None:
        return None if self.type == "cpu" else getattr(torch, self.type)


def available() -> list[str]:
    """The kinds of device on this machine, the preferred first; "cpu" is always the last."""
    kinds = ["cuda"] if torch.cuda.is_available() else []
    if importlib.util.find_spec("torch_npu") is not None:
        kinds += ["npu"] if importlib.import_module("torch_npu").npu.is_available() else []
    return [*kinds, "cpu"]


_STATUS = "/proc/self/status"
_CLEAR_REFS = "/proc/self/clear_refs"
_VM_LINES = re.compile(rb"^VmHWM:\s*(\d+) kB$.*?^VmRSS:\s*(\d+) kB$", re.MULTILINE | re.DOTALL)


def host_memory() -> HostMemory:
    """Resident bytes of this process now, and their peak since `reset_host_peak` (or since the start).

    Takes about 11 us: every phase of every step calls it. The file is opened each time, because a kept descriptor
    would go on describing the parent after a fork.
    """
    try:
        descriptor = os.open(_STATUS, os.O_RDONLY)
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, which has no /proc
        return HostMemory(peak, peak)
    try:
        text = os.read(descriptor, 8192)
    finally:
        os.close(descriptor)
    found = _VM_LINES.search(text)
    assert found is not None, text
    return HostMemory(rss_bytes=int(found[2]) * 1024, peak_rss_bytes=int(found[1]) * 1024)


def reset_host_peak() -> bool:
    """Start a new peak of resident bytes at the present value; False where the kernel does not allow it."""
    try:
        descriptor = os.open(_CLEAR_REFS, os.O_WRONLY)
        try:
            os.write(descriptor, b"5")
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True
