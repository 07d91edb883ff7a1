"""Which models are refused, and that a model which would be silently wrong is found out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.errors import ModelError
from ebbtide.models import support
from ebbtide.models.attention import ATTENTION, PackedAttention, register
from ebbtide.models.support import PROVEN, context_tokens, probe, refuse_unpackable
from tests.models.zoo import make, tiny_config

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART: dict[str, Any] = {
    "vocab_size": 40,
    "d_model": 32,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "is_decoder": True,
}


def build(model_type: str, **fields: Any) -> Any:
    register()
    torch.manual_seed(0)
    known = {name: value for name, value in SMALL.items() if name in AutoConfig.for_model(model_type).to_dict()}
    config = AutoConfig.for_model(model_type, **{**known, **fields})
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("qwen3_next", "linear_attention"),
        ("qwen3_5_text", "linear_attention"),
        ("lfm2", "conv"),
        ("falcon_h1", "hybrid"),
        ("mamba", "linear_attention"),
        ("jamba", "linear_attention"),
        ("llama4_text", "chunked_attention"),
        ("minimax", "linear_attention"),
    ],
)
def test_layers_that_are_no_attention_are_refused_by_name(model_type: str, kinds: str) -> None:
    config = AutoConfig.for_model(model_type)
    if model_type == "lfm2":
        config = AutoConfig.for_model(model_type, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with pytest.raises(ModelError, match=f"has layers of type .*{kinds}"):
        refuse_unpackable(config)


@pytest.mark.parametrize("model_type", sorted(PROVEN))
def test_no_proven_type_is_refused(model_type: str) -> None:
    refuse_unpackable(tiny_config(model_type))
    assert context_tokens(tiny_config(model_type)) == 128


def test_frequencies_that_follow_the_longest_neighbour_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ModelError, match="rope_type 'dynamic'"):
        refuse_unpackable(tiny_config("llama", rope_parameters=rope))


def test_the_context_of_longrope_is_the_original_one() -> None:
    factors = [1.0] * 4
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 1e4}
    config = tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    assert context_tokens(config) == 32


def test_a_model_without_a_context_is_refused() -> None:
    with pytest.raises(ModelError, match="model='bloom': its config has no max_position_embeddings"):
        context_tokens(AutoConfig.for_model("bloom"))


def test_windows_that_cannot_be_checked_are_refused() -> None:
    config = AutoConfig.for_model("phimoe", sliding_window=8)
    with pytest.raises(ModelError, match="does not say in which layers"):
        refuse_unpackable(config)
    refuse_unpackable(AutoConfig.for_model("phimoe", sliding_window=None))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("helium", {"head_dim": 8}),
        ("gpt_neox", {}),
        ("biogpt", {}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        ("phimoe", {"sliding_window": None, "num_local_experts": 4}),
    ],
)
def test_other_types_pass_the_probe(model_type: str, fields: dict[str, Any]) -> None:
    """Learned absolute positions among them: they follow position_ids."""
    model = build(model_type, **fields)
    model.train()
    probe(model)
    assert model.training
    assert model.config._attn_implementation == ATTENTION


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        # Their heads transform the hidden state before they project it, or their positions ignore position_ids.
        ("bert", {"is_decoder": True}, "packed sequences give other logits"),
        ("roberta", {"is_decoder": True, "max_position_embeddings": 80}, "packed sequences give other logits"),
        ("bart", BART, "packed sequences give other logits"),
        ("electra", {"is_decoder": True}, "it cannot run packed: RuntimeError"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "0 of 2 layers attended through the plan|it cannot run packed"),
        ("stablelm", {}, "do not hand it on"),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}, "attention sinks"),
        ("doge", {"num_key_value_heads": 4}, "no mask"),
    ],
)
def test_types_that_would_be_silently_wrong_are_found_by_the_probe(
    model_type: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        probe(build(model_type, **fields))


def test_the_probe_goes_red_on_a_leak_between_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault put back: one causal sequence instead of several."""

    class Leaky(PackedAttention):
        def __init__(self, cu_seqlens: Tensor) -> None:
            super().__init__(cu_seqlens[[0, -1]])

    model = build("llama")
    probe(model)
    monkeypatch.setattr(support, "PackedAttention", Leaky)
    with pytest.raises(ModelError, match="of their spread apart"):
        probe(model)


def test_the_probe_goes_red_on_a_token_shift() -> None:
    """State beside attention: a layer that looks at the token before, whoever's it is."""

    class Shift(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor) -> Tensor:
            return self.inner(hidden + 0.5 * torch.nn.functional.pad(hidden, (0, 0, 1, -1)))  # type: ignore[no-any-return]

    model = build("llama")
    model.model.layers[0].mlp = Shift(model.model.layers[0].mlp)
    with pytest.raises(ModelError, match="packed sequences give other logits"):
        probe(model)


def test_the_probe_passes_in_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        probe(make("llama").to(dtype))


def test_the_probe_leaves_a_models_attention_as_it_was_after_a_failure() -> None:
    model = build("bert", is_decoder=True)
    with pytest.raises(ModelError):
        probe(model)
    assert model.config._attn_implementation == ATTENTION
