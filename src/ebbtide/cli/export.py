"""`ebbtide export`: a run's weights as a Hugging Face checkpoint of their own."""

import json
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Export"]


class Export:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads."""

    name = "export"
    help = "a run's weights as a Hugging Face checkpoint"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `Command.add_arguments`."""
        parser.add_argument("run", type=Path, help="the run's folder")
        parser.add_argument("target", type=Path, help="the folder to write")
        parser.add_argument("--step", type=int, help="the checkpoint after this step in place of the last")
        parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="store weights in this dtype")
        parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in the target")
        parser.add_argument("--json", action="store_true", help="one JSON object on standard output")

    def run(self, arguments: Namespace) -> int:
        """See `Command.run`."""
        from ebbtide.observe.run_folder import RunFolder

        source = RunFolder.open(arguments.run).checkpoint(arguments.step)
        _check_target(arguments.target, source, overwrite=arguments.overwrite)
        _write(source, arguments.target, arguments.dtype)
        num_bytes = sum(path.stat().st_size for path in arguments.target.iterdir())
        if arguments.json:
            print(json.dumps({"source": str(source), "target": str(arguments.target), "bytes": num_bytes}))
        else:
            from ebbtide.units import format_bytes

            print(f"{arguments.target}: {format_bytes(num_bytes)} from {source}")
        return 0


def _check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    from ebbtide.errors import CheckpointError, problem

    where = str(target)
    if target.resolve() == source.resolve() or target.resolve() in source.resolve().parents:
        raise CheckpointError(problem("target", where, "holds the weights that are to be exported", "Name another one"))
    if target.exists() and not target.is_dir():
        raise CheckpointError(problem("target", where, "is a file", "Name a folder"))
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / "config.json").is_file():
        raise CheckpointError(problem("target", where, "exists and is no checkpoint, so that nothing in it may go"))
    if not overwrite:
        raise CheckpointError(problem("target", where, "holds a checkpoint", "Replace it by --overwrite"))


def _write(source: Path, target: Path, dtype: str | None) -> None:
    """Copy the checkpoint, which is complete before it takes its place; an older one steps aside first."""
    unfinished, old = (target.with_name(f".{target.name}.{word}") for word in ("unfinished", "old"))
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        shutil.copy2(file, unfinished)
    if dtype is not None:
        _convert(unfinished, dtype)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    unfinished.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _convert(folder: Path, dtype: str) -> None:
    """Store floating-point weights in another dtype; one file of them is in memory at a time."""
    import torch
    from safetensors.torch import load_file, save_file

    num_bytes = 0
    for file in sorted(folder.glob("*.safetensors")):
        stored = load_file(file)
        wanted = {
            name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            for name, tensor in stored.items()
        }
        save_file(wanted, file, metadata={"format": "pt"})
        num_bytes += sum(tensor.nbytes for tensor in wanted.values())
    _edit(folder / "config.json", lambda tree: tree | {"dtype": dtype})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _edit(index, lambda tree: tree | {"metadata": tree.get("metadata", {}) | {"total_size": num_bytes}})


def _edit(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    tree = change(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
