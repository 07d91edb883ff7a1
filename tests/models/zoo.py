"""Tiny models of every type that is held to work, with weights large enough that attention matters."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.models.attention import ATTENTION, register
from ebbtide.types import TrainBatch

__all__ = ["FIELDS", "VOCABULARY", "make", "own_logprobs", "packed", "tiny_config"]

VOCABULARY = 40
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "query_pre_attn_scalar": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FIELDS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, **_MIXED},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 12,
    },
    "exaone4": _MIXED,
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "ministral": _MIXED,
    "olmo3": _MIXED,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **_MIXED},
}
"""What a type needs beside the shared fields, or in another value."""

_VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}


def tiny_config(model_type: str, **fields: Any) -> Any:
    """A config of the type; of a model with an image tower, around a tiny text model."""
    defaults = AutoConfig.for_model(model_type)
    if defaults.get_text_config() is not defaults:
        text = tiny_config(f"{model_type}_text", **fields).to_dict()
        return AutoConfig.for_model(model_type, text_config=text, vision_config=_VISION, mm_tokens_per_image=4)
    known = {name: value for name, value in _SHARED.items() if name in defaults.to_dict()}
    return AutoConfig.for_model(model_type, **{**known, **FIELDS.get(model_type, {}), **fields})


def make(model_type: str, *, attention: str = ATTENTION, **fields: Any) -> Any:
    """The model in float32; the same weights whatever the attention."""
    register()
    torch.manual_seed(0)
    config = copy.deepcopy(tiny_config(model_type, **fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    model.config.use_cache = False
    return model.eval()


def own_logprobs(model: Any, batch: TrainBatch, temperature: float = 1.0) -> Tensor:
    """[N], of the trained tokens by the model's own forward, one sequence at a time; differentiable."""
    found = []
    for b in range(batch.num_sequences):
        one = batch.select([b])
        logits = model(input_ids=one.tokens[None], use_cache=False).logits[0].float() / temperature
        at = one.loss_mask.nonzero().squeeze(1)
        found.append(logits.log_softmax(-1)[at - 1].gather(1, one.tokens[at][:, None]).squeeze(1))
    return torch.cat(found)


def packed(lengths: list[tuple[int, int]], *, per_group: int = 1, seed: int = 0) -> TrainBatch:
    """Sequences of (prompt tokens, completion tokens); `per_group` in a row share the first's prompt."""
    generator = torch.Generator().manual_seed(seed)
    sequences, group_ids = [], []
    prompt = torch.empty(0)
    for b, (num_prompt, num_completion) in enumerate(lengths):
        if b % per_group == 0:
            prompt = torch.randint(3, VOCABULARY, (num_prompt,), generator=generator)
        completion = torch.randint(3, VOCABULARY, (num_completion,), generator=generator)
        sequences.append((prompt, completion, torch.zeros(num_completion)))
        group_ids.append(b // per_group)
    return TrainBatch.pack(sequences, group_ids=group_ids)
