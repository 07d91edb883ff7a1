"""A checkpoint as Hugging Face lays it out, written weight by weight and complete or not there at all."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ebbtide.errors import CheckpointError, problem
from ebbtide.models.hub import checkpoint_weights
from ebbtide.units import GIB

__all__ = ["save_checkpoint"]

_SHARD_BYTES = 4 * GIB


def save_checkpoint(
    path: Path,
    weights: Iterable[tuple[str, Tensor]],
    config: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; an older one at `path` is replaced.

    The folder is complete whenever it is there: it is written beside, and an older one goes when the new one is whole.

    Args:
        path: the folder.
        weights: every weight under the name of the model's parameter, once; tied ones under one of their names.
        config: the transformers config; not changed.
        tokenizer: written beside the weights; None writes none.
        dtype: what floating-point weights are stored in; None keeps each as it is.

    Raises:
        CheckpointError: no weight came, or one came twice.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    stored = _write_shards(unfinished, checkpoint_weights(config, weights), dtype)
    config = type(config).from_dict(
        {**config.to_dict(), "use_cache": True, "dtype": str(stored).removeprefix("torch.")}
    )
    config.architectures = [_architecture(config)]
    config.save_pretrained(unfinished)
    if tokenizer is not None:
        tokenizer.save_pretrained(unfinished)
    _replace(path, unfinished)


def _replace(path: Path, finished: Path) -> None:
    """A folder cannot be renamed over one that is not empty, so the old one steps aside first."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    finished.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> torch.dtype:
    """At most one shard of weights is in memory at a time; the dtype of the first floating-point weight."""
    shard: dict[str, Tensor] = {}
    names: list[list[str]] = []
    stored: torch.dtype | None = None
    shard_bytes = total_bytes = 0
    for name, tensor in weights:
        if name in shard or any(name in held for held in names):
            raise CheckpointError(problem("weights", name, "came twice", "Name each weight once"))
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        owned = torch.empty(tensor.shape, dtype=wanted).copy_(tensor.detach())
        if shard and shard_bytes + owned.nbytes > _SHARD_BYTES:
            names.append(_flush(folder, len(names), shard))
            shard, shard_bytes = {}, 0
        if stored is None and owned.is_floating_point():
            stored = owned.dtype
        shard[name] = owned
        shard_bytes += owned.nbytes
        total_bytes += owned.nbytes
    if stored is None:
        raise CheckpointError(problem("weights", total_bytes, "there are none to save", "Pass all of named_weights()"))
    names.append(_flush(folder, len(names), shard))
    _name_shards(folder, names, total_bytes)
    return stored


def _flush(folder: Path, number: int, shard: dict[str, Tensor]) -> list[str]:
    try:
        save_file(shard, folder / f"shard-{number}", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        raise CheckpointError(problem("checkpoint", str(folder), f"cannot be written: {error}")) from error
    return list(shard)


def _name_shards(folder: Path, names: list[list[str]], total_bytes: int) -> None:
    if len(names) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, held in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(held, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _architecture(config: Any) -> str:
    return str(AutoModelForCausalLM._model_mapping[type(config)].__name__)
