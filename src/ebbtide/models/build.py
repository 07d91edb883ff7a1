"""From a recipe's [model] to a transformers model that attends through plans, and its tokenizer."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ebbtide.env import is_hub_offline
from ebbtide.errors import ConfigError, ModelError, problem
from ebbtide.models.attention import ATTENTION, register
from ebbtide.models.tokenizer import EOS, PAD, SPECIAL, character_tokenizer
from ebbtide.recipe import ModelSection

__all__ = ["build_model", "build_shell", "context_tokens", "eos_ids", "load_config", "load_tokenizer", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a recipe names."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, or one of characters."""
    if section.path is not None:
        return AutoTokenizer.from_pretrained(_checkpoint(section.path))
    assert section.alphabet is not None, section
    return character_tokenizer(section.alphabet, context_tokens(load_config(section)))


def load_config(section: ModelSection) -> Any:
    """The transformers config: the checkpoint's, or the architecture's with the vocabulary of its alphabet.

    Raises:
        ConfigError: unknown model type or field.
        ModelError: a model whose layers cannot be packed.
    """
    if section.path is not None:
        config = AutoConfig.from_pretrained(_checkpoint(section.path))
    else:
        assert section.architecture is not None, section
        assert section.alphabet is not None, section
        config = _config_from_fields(dict(section.architecture), vocab_size=len(section.alphabet) + len(SPECIAL))
    _refuse_unpackable(config)
    return config


def context_tokens(config: Any) -> int:
    """Longest sequence that the model takes, prompt and completion together."""
    return int(config.get_text_config().max_position_embeddings)


def eos_ids(config: Any, tokenizer: PreTrainedTokenizerBase, generation_config: Any = None) -> tuple[int, ...]:
    """Every token id that ends a completion, by the tokenizer, the config and the generation config."""
    found: set[int] = set()
    ids = (
        tokenizer.eos_token_id,
        config.get_text_config().eos_token_id,
        getattr(generation_config, "eos_token_id", None),
    )
    for value in ids:
        found.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(found))


def build_model(section: ModelSection, *, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model with its weights, on the CPU: the checkpoint's, or random ones fixed by `seed`."""
    register()
    config = load_config(section)
    if section.path is not None:
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                _checkpoint(section.path), config=config, dtype=dtype, attn_implementation=ATTENTION
            )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    model.config.use_cache = False
    return model


def build_shell(config: Any, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights: parameters on the meta device, computed buffers real.

    Weights arrive later, by name. Buffers that are computed and not stored, such as rotary frequencies, would be lost
    on the meta device without an error.
    """
    register()
    with _meta_parameters():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    model.config.use_cache = False
    return model.requires_grad_(False).eval()


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The console has one bar, the run's own."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _meta_parameters() -> Iterator[None]:
    original = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _checkpoint(path: str) -> str:
    """A folder or a hub id, refused early where neither can work."""
    if Path(path).is_dir():
        return path
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).parent.is_dir()
    if looks_local and not _is_hub_id(path):
        raise ConfigError(problem("model.path", path, "no such folder", "Give a checkpoint folder or a hub id"))
    if is_hub_offline() and not _is_cached(path):
        rule = "is no folder here, and HF_HUB_OFFLINE forbids the hub"
        raise ConfigError(problem("model.path", path, rule, "Give a folder, or unset HF_HUB_OFFLINE"))
    return path


def _is_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).parent.is_dir()


def _is_cached(path: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(path, "config.json"), str)


def _config_from_fields(fields: dict[str, Any], vocab_size: int) -> Any:
    model_type = fields.pop("model_type")
    try:
        defaults = AutoConfig.for_model(model_type)
    except ValueError as error:
        rule = "transformers knows no such model type"
        raise ConfigError(problem("model.architecture.model_type", model_type, rule)) from error
    unknown = [name for name in fields if not hasattr(defaults, name)]
    if unknown:
        raise ConfigError([problem(f"model.architecture.{name}", fields[name], f"{model_type} has no such field")
                           for name in unknown])  # fmt: skip
    special = {"pad_token_id": SPECIAL.index(PAD), "eos_token_id": SPECIAL.index(EOS), "bos_token_id": None}
    return AutoConfig.for_model(model_type, **{"vocab_size": vocab_size, **special, **fields})


def _refuse_unpackable(config: Any) -> None:
    """Layers that carry state from token to token without attention would mix packed neighbours, silently."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    odd = sorted(kinds - {"full_attention", "sliding_attention"})
    if odd:
        rule = f"has layers of type {', '.join(odd)}, which would leak state between packed sequences"
        raise ModelError(problem("model", text.model_type, rule, "Choose a model of attention layers only"))
