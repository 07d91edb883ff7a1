"""An engine's weights and optimizer in a folder, by torch's distributed checkpoint.

Everything is stored whole under the weights' Hugging Face names, in pieces that any mesh and any number of stages can
read: what was saved on one is loaded on another bit by bit.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ebbtide.errors import CheckpointError, problem

__all__ = ["load", "save"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEPS = "num_steps_done"


def save(
    path: Path, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, num_steps_done: int
) -> None:
    """Write the folder; every rank takes part.

    Args:
        path: the folder.
        weights: of this rank, under their names; one that several ranks give must be equal on all.
        optimizer: its state of these weights, where it has any.
        num_steps_done: of the schedule.
    """
    state = _tensors(weights, optimizer) | {_STEPS: torch.tensor(num_steps_done)}
    with _alone():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=not dist.is_initialized())


def load(path: Path, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Restore weights and optimizer in place; the schedule's steps.

    Raises:
        CheckpointError: no checkpoint there, or not of these weights.
    """
    reader = dcp.FileSystemReader(path)
    try:
        stored = set(reader.read_metadata().state_dict_metadata)
    except OSError as error:
        raise CheckpointError(problem("checkpoint", str(path), f"cannot be read: {error}")) from error
    _make_state(weights, optimizer, stored)
    state = _tensors(weights, optimizer) | {_STEPS: torch.tensor(0)}
    missing = sorted(set(state) - stored)
    if missing:
        rule = f"lacks {len(missing)} of this model's tensors, the first of them {missing[0]}"
        raise CheckpointError(problem("checkpoint", str(path), rule, "Is it of another model?"))
    try:
        with _alone(), torch.no_grad():
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, ValueError) as error:
        raise CheckpointError(problem("checkpoint", str(path), f"does not fit this model: {error}")) from error
    return int(state[_STEPS])


def _tensors(weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {f"weights.{name}": weight.detach() for name, weight in weights.items()}
    for name, weight in weights.items():
        for key, value in optimizer.state.get(weight, {}).items():
            found[f"optimizer.{name}.{key}"] = value
    return found


def _make_state(weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, stored: set[str]) -> None:
    """A state to read into, for each weight that has one in the checkpoint, and for no other."""
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for name, weight in weights.items():
        if f"optimizer.{name}.step" not in stored or id(weight) not in trained:
            optimizer.state.pop(weight, None)
        elif not optimizer.state.get(weight):
            moments = {key: torch.zeros_like(weight.detach()) for key in _MOMENTS}
            optimizer.state[weight] = {"step": torch.zeros((), device=weight.device), **moments}


class _alone(warnings.catch_warnings):  # noqa: N801 a context manager's name
    """Silences the remark that one process saves for itself alone, which is what is meant."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)
