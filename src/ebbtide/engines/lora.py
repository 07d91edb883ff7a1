"""Low-rank adapters by peft, put into a model in place; the frozen weights beneath stay the reference policy."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebbtide.config import Section
from ebbtide.errors import ConfigError, MissingExtraError, problem

__all__ = ["LoraSection", "adapter_config", "adapter_name", "inject", "merged", "merged_name", "without_adapters"]

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
    peft = _peft()
    targets = list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )
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


def adapter_config(lora: LoraSection, base: str | None) -> dict[str, Any]:
    """What peft's `adapter_config.json` says of such an adapter; `base` is the model that it belongs to."""
    targets = list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets
    config: dict[str, Any] = (
        _peft()
        .LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=targets,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            inference_mode=True,
        )
        .to_dict()
    )
    return config


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


def adapted(model: nn.Module) -> dict[str, Any]:
    """The modules that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextlib.contextmanager
def without_adapters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the models compute as if they had none: the frozen reference."""
    layers: list[Any] = [layer for module in modules for layer in adapted(module).values()]
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch also changes requires_grad, which sharding has fixed
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        rule = "adapters need peft"
        raise MissingExtraError(problem("engine.lora", "peft", rule, "pip install 'ebbtide[peft]'")) from error
    return peft
