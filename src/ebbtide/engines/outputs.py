"""The sealed outputs of microbatches as bytes and back, for ranks that have not computed the loss themselves."""

from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from ebbtide.engines.base import MicrobatchOutput
from ebbtide.types import Ratio

__all__ = ["decode", "encode"]


def encode(outputs: Sequence[MicrobatchOutput]) -> bytes:
    """All outputs, in order."""
    tensors: dict[str, Tensor] = {}
    for number, output in enumerate(outputs):
        tensors[f"{number}/sequences"] = torch.tensor(output.sequences, dtype=torch.int64)
        tensors[f"{number}/loss"] = output.loss
        tensors[f"{number}/logprobs"] = output.logprobs
        if output.entropy is not None:
            tensors[f"{number}/entropy"] = output.entropy
        for place, (name, ratio) in enumerate(output.metrics.items()):  # the file's order is its own
            tensors[f"{number}/total/{place}/{name}"] = ratio.total
            tensors[f"{number}/count/{place}/{name}"] = ratio.count
    # Copies, since metrics may share a tensor, which the format refuses.
    data: bytes = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    return data


def decode(data: bytes, device: torch.device) -> list[MicrobatchOutput]:
    """What `encode` was given, on the device."""
    tensors = {name: tensor.to(device) for name, tensor in load(data).items()}
    num = sum(name.endswith("/sequences") and name.count("/") == 1 for name in tensors)
    return [_output(number, tensors) for number in range(num)]


def _output(number: int, tensors: dict[str, Tensor]) -> MicrobatchOutput:
    prefix = f"{number}/total/"
    places = sorted((name.removeprefix(prefix) for name in tensors if name.startswith(prefix)), key=_place)
    return MicrobatchOutput(
        sequences=tuple(tensors[f"{number}/sequences"].tolist()),
        loss=tensors[f"{number}/loss"],
        logprobs=tensors[f"{number}/logprobs"],
        entropy=tensors.get(f"{number}/entropy"),
        metrics={
            place.partition("/")[2]: Ratio(tensors[prefix + place], tensors[f"{number}/count/{place}"])
            for place in places
        },
    )


def _place(name: str) -> int:
    return int(name.partition("/")[0])
