"""Adapters on both engines: what peft computes with them, in merged weights and in its own file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ebbtide.engines.lora import LoraSection, save_adapter
from ebbtide.engines.mesh_engine import MeshEngine
from ebbtide.errors import ConfigError, EngineError
from ebbtide.models.build import build_model
from tests.contracts.engines import Mesh, make_engine, mine, ragged_batch, run, setting, sft

peft: Any = pytest.importorskip("peft", reason="adapters are peft's")

ONE = Mesh("fsdp", 1)
TWO = [Mesh("fsdp", 2), Mesh("pipeline", 2, {"pp": 2})]
LORA: dict[str, Any] = {"rank": 2, "alpha": 8.0}


def trained(mesh: Mesh, then: Callable[[MeshEngine], Any], **lora: Any) -> list[Any]:
    def fn(_: int) -> Any:
        engine = make_engine(mesh, setting(), lora={**LORA, **lora})
        own = mine(engine, ragged_batch(6))
        for _ in range(2):
            engine.forward_backward(own, sft())
            engine.optim_step()
        return then(engine)

    return run(mesh, fn)


def weights(engine: MeshEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def base() -> dict[str, Tensor]:
    how = setting()
    return dict(build_model(how.model, dtype=torch.float32, seed=how.seed).named_parameters())


def test_merged_weights_have_the_models_names_and_move_only_where_adapters_are() -> None:
    (found,) = trained(ONE, weights, targets=("q_proj", "v_proj"))
    original = base()
    assert list(found) == list(original)
    moved = {name.split(".")[-2] for name, weight in found.items() if not torch.equal(weight, original[name])}
    assert moved == {"q_proj", "v_proj"}


@pytest.mark.parametrize("mesh", TWO, ids=str)
def test_ranks_train_the_same_adapters_as_one_device(mesh: Mesh) -> None:
    (expected,) = trained(ONE, weights)
    for found in trained(mesh, weights):
        assert list(found) == list(expected)
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_peft_loads_the_adapter_and_merges_it_to_the_same_weights(tmp_path: Path) -> None:
    how = setting()

    def export(engine: MeshEngine) -> dict[str, Tensor]:
        save_adapter(tmp_path / "adapter", engine.adapter_weights(), LoraSection(**LORA), str(tmp_path / "base"))
        return weights(engine)

    (expected,) = trained(ONE, export)
    build_model(how.model, dtype=torch.float32, seed=how.seed).save_pretrained(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("mesh", [ONE, *TWO], ids=str)
def test_the_reference_is_the_frozen_base_bit_by_bit(mesh: Mesh) -> None:
    batch = ragged_batch(6)

    def fn(_: int) -> tuple[bool, bool, bool]:
        engine = make_engine(mesh, setting(), lora=LORA)
        own = mine(engine, batch)
        before = engine.logprobs(own)
        engine.forward_backward(own, sft())
        engine.optim_step()
        after, reference = engine.logprobs(own), engine.reference_logprobs(own)
        again = engine.logprobs(own)
        return torch.equal(before, reference), torch.equal(before, after), torch.equal(after, again)

    assert run(mesh, fn) == [(True, False, True)] * mesh.world


def test_adapters_are_saved_and_loaded_across_engines(tmp_path: Path) -> None:
    def save(engine: MeshEngine) -> dict[str, Tensor]:
        engine.save(tmp_path / "saved")
        return weights(engine)

    saved = trained(TWO[1], save)[0]
    engine = make_engine(ONE, setting(), lora=LORA)
    engine.load(tmp_path / "saved")
    assert all(torch.equal(weight, saved[name]) for name, weight in weights(engine).items())


def test_only_adapters_have_optimizer_state() -> None:
    (counts,) = trained(ONE, lambda engine: (len(engine._optimizer.state), len(list(engine.adapter_weights()))))
    assert counts[0] == counts[1]


def test_an_engine_without_adapters_has_none_to_give() -> None:
    engine = make_engine(ONE, setting())
    with pytest.raises(EngineError, match="trains no adapters"):
        engine.adapter_weights()
    with pytest.raises(EngineError, match="trains no adapters"):
        engine.reference_logprobs(ragged_batch(2))


def test_targets_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="no module of the model"):
        make_engine(ONE, setting(), lora={"targets": ("qq_proj",)})


def test_tensor_parallel_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="adapters are not divided"):
        make_engine(Mesh("fsdp", 1, {"tp": 2}), setting(), lora=LORA)
