"""`ebbtide export`: a run's weights as a Hugging Face checkpoint of their own."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

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
        import torch
        from transformers import AutoConfig, AutoTokenizer

        from ebbtide.models.export import save_checkpoint

        dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
        config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
        save_checkpoint(arguments.target, _weights(source), config, tokenizer, dtype=dtype)
        if (source / "generation_config.json").is_file():
            shutil.copy(source / "generation_config.json", arguments.target)
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


def _weights(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Every stored weight by its name, one in memory at a time."""
    from safetensors import safe_open

    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 it is no mapping
                yield name, weights.get_tensor(name)
