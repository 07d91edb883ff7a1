import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from ebbtide.errors import ConfigError, ModelError
from ebbtide.models import build
from ebbtide.models.attention import ATTENTION
from ebbtide.models.build import build_model, build_shell, eos_ids, load_config, load_tokenizer, torch_dtype
from ebbtide.recipe import ModelSection
from tests.models.zoo import tiny_config

ALPHABET = "0123456789"
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def section(**fields: Any) -> ModelSection:
    return ModelSection(alphabet=ALPHABET, architecture=FIELDS | fields)


def test_an_architecture_takes_its_vocabulary_and_end_from_the_alphabet() -> None:
    config, tokenizer = load_config(section()), load_tokenizer(section())
    assert config.vocab_size == len(tokenizer) == 13
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert tokenizer.model_max_length == 64


def test_the_seed_alone_fixes_the_weights() -> None:
    torch.manual_seed(7)
    first = build_model(section(), dtype=torch.float32, seed=1)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), drawn), "building a model must not use up the caller's random numbers"
    torch.manual_seed(8)
    again = build_model(section(), dtype=torch.float32, seed=1)
    other = build_model(section(), dtype=torch.float32, seed=2)
    for (name, a), b in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_dropout_and_router_noise_are_off() -> None:
    """A probability must not depend on chance: the ratio of policies would be noise."""
    model = build_model(
        section(model_type="phi", attention_dropout=0.2, resid_pdrop=0.3, embd_pdrop=0.4), dtype=torch.float32, seed=0
    )
    model.train()
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] != []
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))
    assert model.config.attention_dropout == 0
    mixture = build_model(
        section(model_type="mixtral", num_key_value_heads=4, num_local_experts=2, router_jitter_noise=0.1),
        dtype=torch.float32,
        seed=0,
    )
    assert mixture.config.router_jitter_noise == 0
    config = load_config(section(model_type="phi", resid_pdrop=0.3))
    assert config.resid_pdrop == 0.3, "the config that is exported keeps what it says"


def test_a_type_that_no_test_covers_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    monkeypatch.setattr(build, "probe", lambda model: probed.append(model.config.model_type))
    build_model(section(), dtype=torch.float32, seed=0)
    build_model(section(model_type="helium", num_key_value_heads=4, head_dim=8), dtype=torch.float32, seed=0)
    assert probed == ["helium"]


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    architecture = {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    with pytest.raises(ModelError, match="model='gptj': its attention does not go through"):
        build_model(ModelSection(alphabet=ALPHABET, architecture=architecture), dtype=torch.float32, seed=0)


def test_wrong_architectures_are_errors_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"model\.architecture\.model_type='lama': transformers knows no such"):
        load_config(section(model_type="lama"))
    with pytest.raises(ConfigError, match="hidden_sise=3: llama has no such field") as caught:
        load_config(section(hidden_sise=3, layers=2))
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match=r"transformers refuses it: .*hidden_size"):
        load_config(section(hidden_size="wide"))
    with pytest.raises(ModelError, match="linear_attention"):
        load_config(section(model_type="qwen3_next"))


def test_a_checkpoint_gives_its_config_tokenizer_and_weights(tiny_checkpoint: Path) -> None:
    stored = load_file(tiny_checkpoint / "model.safetensors")
    model = build_model(ModelSection(path=str(tiny_checkpoint)), dtype=torch.float32, seed=0)
    assert model.config._attn_implementation == ATTENTION
    assert not model.config.use_cache
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
    half = build_model(ModelSection(path=str(tiny_checkpoint)), dtype=torch.bfloat16, seed=0)
    assert {item.dtype for item in half.parameters()} == {torch.bfloat16}
    assert len(load_tokenizer(ModelSection(path=str(tiny_checkpoint)))) == model.config.vocab_size


def copy_of(checkpoint: Path, target: Path) -> Path:
    target.mkdir()
    for file in checkpoint.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_checkpoint_without_all_weights_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_checkpoint, tmp_path / "checkpoint")
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the model's weights.*model\.layers\.1\.mlp\.up_proj\.weight"):
        build_model(ModelSection(path=str(folder)), dtype=torch.float32, seed=0)


def test_damaged_checkpoints_are_errors_of_the_configuration(tiny_checkpoint: Path, tmp_path: Path) -> None:
    where = ModelSection(path=str(copy_of(tiny_checkpoint, tmp_path / "checkpoint")))
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ConfigError, match="its weights cannot be read"):
        build_model(where, dtype=torch.float32, seed=0)
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="its weights cannot be read"):
        build_model(where, dtype=torch.float32, seed=0)
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="its tokenizer cannot be read"):
        load_tokenizer(where)
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ConfigError, match="its config cannot be read"):
        load_config(where)


@pytest.mark.parametrize("path", ["no_such_folder", "./here/there", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_nothing_says_so(path: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_config(ModelSection(path=path))


def test_a_hub_id_offline_says_why() -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids the hub"):
        load_config(ModelSection(path="someone/some-model"))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "phi3"])
def test_a_shell_has_no_weights_and_all_computed_buffers(model_type: str) -> None:
    config = tiny_config(model_type)
    shell = build_shell(config, dtype=torch.bfloat16)
    assert {item.device.type for item in shell.parameters()} == {"meta"}
    assert {item.dtype for item in shell.parameters()} == {torch.bfloat16}
    assert not any(item.requires_grad for item in shell.parameters())
    assert not shell.training
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    expected = dict(whole.named_buffers())
    for name, buffer in shell.named_buffers():
        assert torch.equal(buffer, expected.pop(name)), name
    assert not expected
    assert nn.Linear(2, 2).weight.device.type == "cpu", "parameters elsewhere are left alone"


def test_every_end_token_is_known(make_checkpoint: Callable[..., Path]) -> None:
    where = ModelSection(path=str(make_checkpoint("qwen3")))
    config, tokenizer = load_config(where), load_tokenizer(where)
    assert eos_ids(config, tokenizer) == (1,)
    config.eos_token_id = [7, 1, 5]
    assert eos_ids(config, tokenizer) == (1, 5, 7)
    config.eos_token_id = tokenizer.eos_token = None

    class Generation:
        eos_token_id = (9,)

    assert eos_ids(config, tokenizer) == ()
    assert eos_ids(config, tokenizer, Generation()) == (9,)


def test_dtypes_by_name() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
