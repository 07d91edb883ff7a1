"""From a recipe's [model] to a transformers model that attends through plans, and its tokenizer."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ebbtide.env import is_hub_offline
from ebbtide.errors import ConfigError, ModelError, problem
from ebbtide.models.attention import ATTENTION, register
from ebbtide.models.support import PROVEN, context_tokens, probe, refuse_unpackable
from ebbtide.models.tokenizer import EOS, PAD, SPECIAL, character_tokenizer
from ebbtide.recipe import ModelSection

__all__ = ["build_model", "build_shell", "eos_ids", "load_config", "load_tokenizer", "stored_buffers", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a recipe names."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, or one of characters.

    Raises:
        ConfigError: the checkpoint has none that loads.
    """
    if section.path is not None:
        with _readable(section.path, "tokenizer"):
            return AutoTokenizer.from_pretrained(_checkpoint(section.path))
    assert section.alphabet is not None, section
    return character_tokenizer(section.alphabet, context_tokens(load_config(section)))


def load_config(section: ModelSection) -> Any:
    """The transformers config: the checkpoint's, or the architecture's with the vocabulary of its alphabet.

    Raises:
        ConfigError: no such checkpoint; unknown model type or field.
        ModelError: a model whose layers cannot be packed.
    """
    if section.path is not None:
        with _readable(section.path, "config"):
            config = AutoConfig.from_pretrained(_checkpoint(section.path))
    else:
        assert section.architecture is not None, section
        assert section.alphabet is not None, section
        config = _config_from_fields(dict(section.architecture), vocab_size=len(section.alphabet) + len(SPECIAL))
    refuse_unpackable(config)
    return config


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
    """The model with its weights, on the CPU: the checkpoint's, or random ones fixed by `seed`.

    Dropout and router noise are off: the probability of a token must not depend on chance. A model type that the tests
    do not cover is probed.

    Raises:
        ConfigError: no such checkpoint.
        ModelError: the checkpoint lacks weights, or the model cannot be packed.
    """
    register()
    config = _without_noise(load_config(section))
    if section.path is not None:
        model = _from_checkpoint(section.path, config, dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _from_config(config, dtype)
    model.config.use_cache = False
    if config.model_type not in PROVEN:
        probe(model)
    return model


def build_shell(config: Any, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights: parameters on the meta device, computed buffers real.

    Weights arrive later, by name. Buffers that are computed and not stored, such as rotary frequencies, would be lost
    on the meta device without an error.
    """
    register()
    with _meta_parameters():
        model = _from_config(config, dtype)
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


def _from_checkpoint(path: str, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Transformers draws weights that a checkpoint lacks at random; here that is an error."""
    with _no_progress_bar(), _refusal(config), _readable(path, "weights"):
        model, info = AutoModelForCausalLM.from_pretrained(
            _checkpoint(path), config=config, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
        )
    wrong = sorted({str(name) for name in [*info["missing_keys"], *info["mismatched_keys"]]})
    if wrong:
        rule = f"the checkpoint lacks {len(wrong)} of the model's weights, or has them in another shape: {wrong[:3]}"
        raise ModelError(problem("model.path", path, rule, "Is it complete, and a causal language model?"))
    return model


def _from_config(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Of a copy, since building a model writes into its config."""
    with _refusal(config):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=ATTENTION)


@contextlib.contextmanager
def _refusal(config: Any) -> Iterator[None]:
    """Transformers raises KeyError where a model chooses its attention from a table of its own."""
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        rule = "its attention does not go through transformers' attention interface, so it cannot be packed"
        raise ModelError(problem("model", config.model_type, rule, "Choose another model")) from error


def _without_noise(config: Any) -> Any:
    """A copy of the config whose dropout rates and router noise are 0."""
    config = copy.deepcopy(config)
    for part in {id(item): item for item in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            is_noise = "drop" in name or "jitter" in name
            if is_noise and isinstance(value, float) and value:
                setattr(part, name, 0.0)
    return config


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


@contextlib.contextmanager
def _readable(path: str, what: str) -> Iterator[None]:
    """What transformers finds wrong with a checkpoint, as an error of the configuration."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        remedy = "Give a complete Hugging Face checkpoint"
        raise ConfigError(problem("model.path", path, f"its {what} cannot be read: {reason}", remedy)) from error


def _checkpoint(path: str) -> str:
    """A folder or a hub id, refused early where neither can work."""
    if Path(path).is_dir():
        return path
    if not _is_hub_id(path):
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
    try:
        return AutoConfig.for_model(model_type, **{"vocab_size": vocab_size, **special, **fields})
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(problem("model.architecture", fields, f"transformers refuses it: {reason}")) from error


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds; most models have none, as theirs are computed."""
    return {
        f"{prefix}.{name}".removeprefix("."): item
        for prefix, module in model.named_modules()
        for name, item in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
