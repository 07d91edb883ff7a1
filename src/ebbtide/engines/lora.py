"""Low-rank adapters by peft, put into a model in place; the frozen weights beneath stay the reference policy."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.config import Section
from ebbtide.errors import ConfigError, MissingExtraError, problem

__all__ = ["LoraSection", "adapter_name", "inject", "merged", "merged_name", "save_adapter", "without_adapters"]

_ADAPTER = "default"


class LoraSection(Section):
    """`[engine.lora]`: train adapters of low rank and leave the model's own weights as they are."""

    rank: int = Field(16, ge=1)
    """Columns of the first and rows of the second matrix of each adapter."""
    alpha: float = Field(32.0, gt=0)
    """Adapters count alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Ends of the names of the modules that get one, such as 'q_proj'; 'all-linear' means all but the head."""


def inject(model: PreTrainedModel, lora: LoraSection, seed: int) -> None:
    """Give the model its adapters, which change nothing yet, and freeze everything else.

    Raises:
        ConfigError: no module has such a name.
        MissingExtraError: peft is not installed.
    """
    peft, config = _peft(), _config(lora)
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        except ValueError as error:
            rule = "no module of the model can take an adapter by that name"
            raise ConfigError(problem("engine.lora.targets", lora.targets, rule, str(error))) from error
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(dtype)


def save_adapter(path: Path, weights: Iterable[tuple[str, Tensor]], lora: LoraSection, base: str | None) -> None:
    """Write a folder that peft's `PeftModel.from_pretrained` loads.

    Args:
        path: the folder.
        weights: what `AdapterEngine.adapter_weights` gives.
        lora: the engine's settings.
        base: folder or hub id of the model that the adapter belongs to.
    """
    path.mkdir(parents=True, exist_ok=True)
    owned = {name: weight.detach().cpu().contiguous().clone() for name, weight in weights}
    save_file(owned, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = _config(lora)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(path)


def merged_name(name: str) -> str | None:
    """The Hugging Face name of a parameter; None of an adapter's own.

    Example:
        >>> merged_name("layers.0.q_proj.base_layer.weight"), merged_name("layers.0.q_proj.lora_A.default.weight")
        ('layers.0.q_proj.weight', None)
    """
    return None if ".lora_" in name else name.replace(".base_layer.", ".")


def adapter_name(name: str) -> str | None:
    """The name under which peft stores a parameter of an adapter; None of any other.

    Example:
        >>> adapter_name("model.layers.0.q_proj.lora_A.default.weight")
        'base_model.model.model.layers.0.q_proj.lora_A.weight'
    """
    if ".lora_" not in name:
        return None
    return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")


def merged(weight: Tensor, first: Tensor, second: Tensor, lora: LoraSection) -> Tensor:
    """[out, in] the weight with its adapter, in the weight's dtype; `first` is [rank, in] and `second` [out, rank]."""
    return (weight.float() + (lora.alpha / lora.rank) * (second.float() @ first.float())).to(weight.dtype)


@contextlib.contextmanager
def without_adapters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the models compute as if they had none: the frozen reference."""
    layers: list[Any] = [layer for part in modules for layer in part.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch also changes requires_grad, which sharding has fixed
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _config(lora: LoraSection) -> Any:
    targets = list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets
    return _peft().LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        rule = "adapters need peft"
        raise MissingExtraError(problem("engine.lora", "peft", rule, "pip install 'ebbtide[peft]'")) from error
    return peft
