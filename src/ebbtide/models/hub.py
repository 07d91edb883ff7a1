"""Weights under the names, and in the shapes, that checkpoints on the hub have.

transformers keeps some weights otherwise in memory, the experts of a mixture as one tensor a layer for instance. Other
readers, inference engines among them, know the checkpoint's form alone.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from ebbtide.models.build import build_shell

__all__ = ["checkpoint_weights"]


@torch.no_grad()
def checkpoint_weights(config: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each weight as checkpoints have it, one or several for one; most are passed on as they are.

    Args:
        config: the transformers config.
        weights: under the names of the model's parameters.
    """
    shell = build_shell(config, dtype=torch.float32)
    conversions = get_model_conversion_mapping(shell, add_legacy=False)
    # A changed prefix belongs to the checkpoint that a model was loaded from; this one was loaded from none.
    shell._weight_conversions = [item for item in conversions if not isinstance(item, PrefixChange)]
    for name, weight in weights:
        if shell._weight_conversions:
            yield from revert_weight_conversion(shell, {name: weight}).items()
        else:
            yield name, weight
