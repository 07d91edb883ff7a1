"""Which models can be packed, and how that is known.

A model fits when every layer mixes tokens through the attention interface alone, when positions come from
`position_ids`, and when its logits are the head's. Model types in `PROVEN` are compared with transformers' own forward
by the tests, down to gradients and generation. Any other type is probed once, on its own weights, when it is built.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebbtide.errors import ModelError, problem
from ebbtide.models.attention import ATTENTION, PackedAttention
from ebbtide.models.head import logits_of

__all__ = ["PROVEN", "context_tokens", "probe", "refuse_unpackable"]

PROVEN = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "deepseek_v3",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "granite",
        "granitemoe",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
"""Model types whose packed forward the tests hold against transformers' own."""

_PROBE_LENGTHS = (5, 1, 7)
_PROBE_BOUND = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the logits' spread; a leak is of its order
_PROBE_BOUND_HALF = 0.1


def context_tokens(config: Any) -> int:
    """Longest sequence that the model takes, prompt and completion together.

    Rotary embeddings of type longrope change all frequencies, the past ones too, once the longest sequence of a
    forward passes the original context. A token's log-prob would then depend on its neighbours in the batch, so the
    original context is the limit.

    Raises:
        ModelError: the config names no limit.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 2:
        rule = "its config has no max_position_embeddings of at least 2, so no context is known"
        raise ModelError(problem("model", text.model_type, rule, "Choose a model with a fixed context"))
    originals = [
        rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for rope in _rope_parameters(text)
        if rope.get("rope_type") == "longrope"
    ]
    return min([limit, *(int(original) for original in originals if original)])


def refuse_unpackable(config: Any) -> None:
    """Refuse by the config alone what would mix packed neighbours without an error.

    Raises:
        ModelError: layers that carry state outside attention, or frequencies that follow the longest neighbour.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    odd = sorted(kinds - {"full_attention", "sliding_attention"})
    if odd:
        rule = f"has layers of type {', '.join(odd)}, which would leak state between packed sequences"
        raise ModelError(problem("model", text.model_type, rule, "Choose a model of attention layers only"))
    if any(rope.get("rope_type") == "dynamic" for rope in _rope_parameters(text)):
        rule = "its rotary frequencies follow the longest sequence of the batch (rope_type 'dynamic')"
        raise ModelError(
            problem("model", text.model_type, rule, "Within the context rope_type 'default' is the same: set that")
        )
    if text.model_type not in PROVEN and getattr(text, "sliding_window", None) and not hasattr(text, "layer_types"):
        rule = "it has sliding windows and does not say in which layers, so they cannot be checked"
        raise ModelError(problem("model", text.model_type, rule, "Set sliding_window to None in its config"))


@torch.no_grad()
def probe(model: PreTrainedModel) -> None:
    """Compare the packed forward of a few short sequences with the model's own, each alone.

    Raises:
        ModelError: they differ, or either fails.
    """
    config = model.config.get_text_config()
    device = model.get_input_embeddings().weight.device
    ids = [torch.arange(3, 3 + length, device=device) * 7 % config.vocab_size for length in _PROBE_LENGTHS]
    was_training = model.training
    model.eval()
    try:
        packed = _packed_logits(model, ids)
        model.set_attn_implementation("eager")  # transformers' sdpa leaves soft-caps out, without an error
        own = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in ids]).float()
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        rule = f"it cannot run packed: {type(error).__name__}: {error}"
        raise ModelError(problem("model", config.model_type, rule, "Choose another model")) from error
    finally:
        model.set_attn_implementation(ATTENTION)
        model.train(was_training)
    apart = float((packed - own).abs().max() / own.std())
    if not apart <= _PROBE_BOUND.get(model.dtype, _PROBE_BOUND_HALF):
        rule = f"packed sequences give other logits than each alone: {apart:.2g} of their spread apart"
        raise ModelError(problem("model", config.model_type, rule, "It cannot be packed; choose another model"))


def _packed_logits(model: PreTrainedModel, ids: list[Tensor]) -> Tensor:
    """[T, V] float32."""
    lengths = torch.tensor([0, *(len(row) for row in ids)], dtype=torch.int32)
    plan = PackedAttention(lengths.cumsum(0).int().to(ids[0].device))
    positions = torch.cat([torch.arange(len(row), device=row.device) for row in ids])
    backbone = model.get_decoder()
    output = backbone(input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False, plan=plan)
    num_layers = model.config.get_text_config().num_hidden_layers
    if plan.calls != num_layers:
        rule = f"{plan.calls} of {num_layers} layers attended through the plan"
        raise ModelError(problem("model", model.config.model_type, rule, "It cannot be packed; choose another model"))
    return logits_of(model, output.last_hidden_state[0]).float()


def _rope_parameters(text: Any) -> Iterator[dict[str, Any]]:
    """Of all layers, or one a kind of layer."""
    found = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    yield from nested or [found]
