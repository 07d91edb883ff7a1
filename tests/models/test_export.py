"""A checkpoint that anybody's transformers loads, complete or not there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbtide.errors import CheckpointError
from ebbtide.models import export
from ebbtide.models.build import build_model, load_tokenizer
from ebbtide.models.export import save_checkpoint
from ebbtide.models.support import PROVEN
from ebbtide.recipe import ModelSection
from tests.models.zoo import make

IDS = torch.arange(3, 12)[None]


def stored(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights, and buffers that belong to the checkpoint."""
    yield from model.named_parameters()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from ((name, item) for name, item in model.state_dict().items() if name not in names)


def load(path: Path, **arguments: Any) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **arguments)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def names(path: Path) -> set[str]:
    found: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found.update(opened.keys())
    return found


@torch.no_grad()
@pytest.mark.parametrize("model_type", sorted(PROVEN))
def test_every_proven_type_comes_back_as_it_was(model_type: str, tmp_path: Path) -> None:
    model = make(model_type, attention="eager")
    save_checkpoint(tmp_path / "model", stored(model), model.config, None)
    loaded = load(tmp_path / "model", attn_implementation="eager", dtype=torch.float32)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, atol=2e-6, rtol=0)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_and_untied_heads(is_tied: bool, tmp_path: Path) -> None:
    model = make("qwen3", attention="sdpa", tie_word_embeddings=is_tied)
    save_checkpoint(tmp_path / "model", model.named_parameters(), model.config, None)
    assert ("lm_head.weight" in names(tmp_path / "model")) == (not is_tied)
    loaded = load(tmp_path / "model", dtype=torch.float32)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == is_tied
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_experts_are_written_as_the_hub_has_them(tmp_path: Path) -> None:
    model = make("qwen3_moe", attention="eager")
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(model.named_parameters())
    save_checkpoint(tmp_path / "model", model.named_parameters(), model.config, None)
    model.save_pretrained(tmp_path / "theirs")
    assert names(tmp_path / "model") == names(tmp_path / "theirs")
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names(tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_the_dtype_is_stored_and_named(dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = make("qwen3", attention="sdpa")
    save_checkpoint(tmp_path / "model", model.named_parameters(), model.config, None, dtype=dtype)
    loaded = load(tmp_path / "model")
    assert loaded.dtype == (dtype or torch.float32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(loaded.dtype))
    assert model.config.dtype == torch.float32, "the caller's config is not changed"
    assert not model.config.use_cache
    assert loaded.config.use_cache


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_SHARD_BYTES", 20_000)
    model = make("qwen3", attention="sdpa")
    save_checkpoint(tmp_path / "model", model.named_parameters(), model.config, None)
    files = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "model" / file).stat().st_size < 22_000 for file in files)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == names(tmp_path / "model")
    assert index["metadata"]["total_size"] == sum(item.nbytes for item in model.parameters())
    torch.testing.assert_close(load(tmp_path / "model")(IDS).logits, model(IDS).logits, atol=0, rtol=0)


def test_one_weight_larger_than_a_shard_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_SHARD_BYTES", 10)
    model = make("qwen3", attention="sdpa", num_hidden_layers=1)
    save_checkpoint(tmp_path / "model", model.named_parameters(), model.config, None)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == len(list(model.parameters()))
    load(tmp_path / "model")


def test_what_a_recipe_builds_loads_with_its_tokenizer(tmp_path: Path) -> None:
    architecture = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    section = ModelSection(alphabet="0123456789", architecture=architecture)
    model = build_model(section, dtype=torch.float32, seed=0)
    save_checkpoint(tmp_path / "model", model.named_parameters(), model.config, load_tokenizer(section))
    tokenizer, loaded = AutoTokenizer.from_pretrained(tmp_path / "model"), load(tmp_path / "model")
    ids = tokenizer("421", return_tensors="pt").input_ids
    assert ids.tolist() == [[7, 5, 4]]
    answer = loaded.generate(ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("421")
    assert loaded.config._attn_implementation == "sdpa", "what attention it trained with is not the reader's concern"
    again = build_model(ModelSection(path=str(tmp_path / "model")), dtype=torch.float32, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_an_older_checkpoint_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target, model = tmp_path / "run" / "model", make("qwen3", attention="sdpa")
    save_checkpoint(target, model.named_parameters(), model.config, None)
    (target / "left_over").touch()

    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield from list(model.named_parameters())[:3]
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        save_checkpoint(target, breaks(), model.config, None)
    torch.testing.assert_close(load(target)(IDS).logits, model(IDS).logits, atol=0, rtol=0)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    save_checkpoint(target, model.named_parameters(), model.config, None)
    assert torch.equal(load(target).model.norm.weight, model.model.norm.weight)
    assert not (target / "left_over").exists()
    assert [item.name for item in target.parent.iterdir()] == ["model"]


def test_weights_of_any_layout_are_written(tmp_path: Path) -> None:
    """Views, transposes and slices of larger storage, as sharded engines gather them."""
    model = make("qwen3", attention="sdpa", num_hidden_layers=1)
    odd = {name: torch.stack([item.detach(), item.detach()], dim=-1)[..., 1] for name, item in model.named_parameters()}
    save_checkpoint(tmp_path / "model", odd.items(), model.config, None)
    torch.testing.assert_close(load(tmp_path / "model")(IDS).logits, model(IDS).logits, atol=0, rtol=0)


def test_no_weights_and_one_twice_are_errors(tmp_path: Path) -> None:
    model = make("qwen3")
    with pytest.raises(CheckpointError, match="there are none to save"):
        save_checkpoint(tmp_path / "model", [], model.config, None)
    weight = ("lm_head.weight", model.lm_head.weight)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*came twice"):
        save_checkpoint(tmp_path / "model", [weight, weight], model.config, None)
    assert not (tmp_path / "model").exists()
