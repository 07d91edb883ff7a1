"""The engine `fsdp` beyond the contract that all engines share."""

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from ebbtide.engines.base import EngineSetting
from ebbtide.errors import ConfigError
from ebbtide.models.build import build_model, load_config
from ebbtide.recipe import ModelSection, OptimSection
from ebbtide.types import TrainBatch
from tests.contracts.engines import Mesh, make_engine, mine, ragged_batch, run, setting, sft

ONE = Mesh("fsdp", 1)


def plain_step(how: EngineSetting, batch: TrainBatch) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and updated weights by transformers' own forward, one sequence at a time."""
    config = copy.deepcopy(load_config(how.model))
    torch.manual_seed(how.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    starts = batch.cu_seqlens.tolist()
    loss = torch.zeros(())
    for start, stop in itertools.pairwise(starts):
        logits = model(batch.tokens[None, start:stop], use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, batch.tokens[start + 1 : stop, None]).squeeze(1)
        mask = batch.loss_mask[start + 1 : stop]
        loss = loss - (logprobs * batch.advantages[start + 1 : stop])[mask].sum() / batch.loss_mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), how.optim.max_grad_norm or math.inf)
    torch.optim.AdamW(model.parameters(), lr=how.optim.lr, eps=how.optim.eps, weight_decay=0.0).step()
    return float(loss.detach()), float(norm), {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_one_step_equals_plain_transformers_and_adamw(model_type: str) -> None:
    how, batch = setting(model_type, optim=OptimSection(lr=1.0, eps=1.0, max_grad_norm=0.5)), ragged_batch(7)
    loss, norm, weights = plain_step(how, batch)
    engine = make_engine(ONE, how)
    outputs = engine.forward_backward(batch, sft())
    assert sum(float(output.loss) for output in outputs) == pytest.approx(loss, rel=1e-6)
    assert engine.optim_step().grad_norm == pytest.approx(norm, rel=1e-5)
    for name, weight in engine.named_weights():
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=2e-6, msg=name)


def test_one_device_in_one_dtype_is_not_wrapped() -> None:
    engine = make_engine(ONE, setting())
    assert not any(isinstance(module, FSDPModule) for module in engine._parts[0].modules())
    assert not dist.is_initialized()


def test_stored_in_float32_and_computed_with_in_bfloat16() -> None:
    """Masters keep what bfloat16 would round away: a step of a thousandth of a weight."""
    batch = ragged_batch(6)
    engine = make_engine(ONE, setting(compute_dtype="bfloat16", optim=OptimSection(lr=1e-5)))
    plain = make_engine(ONE, setting(optim=OptimSection(lr=1e-5)))
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    outputs = engine.forward_backward(batch, sft()), plain.forward_backward(batch, sft())
    mixed, exact = (sum(float(output.loss) for output in found) for found in outputs)
    assert mixed == pytest.approx(exact, rel=5e-3)
    assert mixed != exact
    assert engine.optim_step().grad_norm == pytest.approx(plain.optim_step().grad_norm, rel=2e-2)
    for name, weight in engine.named_weights():
        assert weight.dtype == torch.float32
        moved = (weight - before[name]).abs()
        assert bool((moved[moved > 0] < 2e-5).all())
        assert bool((moved > 0).any()), name
    engine.close()
    plain.close()
    assert not dist.is_initialized(), "the group made for one rank ends with its last engine"


@pytest.mark.parametrize(
    "mesh", [ONE, Mesh("fsdp", 2), Mesh("pipeline", 2, {"pp": 2}), Mesh("fsdp", 2, {"tp": 2})], ids=str
)
def test_a_narrow_checkpoint_is_trained_in_float32(mesh: Mesh, tmp_path: Path) -> None:
    """Read as it is and widened shard by shard: no rank's weights or buffers differ from those widened at once."""
    how = setting(compute_dtype="float32")
    build_model(how.model, dtype=torch.bfloat16, seed=3).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), dtype="float32", compute_dtype="float32")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = dict(stored.named_parameters())

    def fn(on: Mesh) -> tuple[bool, set[torch.dtype], float]:
        engine = make_engine(on, replace(how, model=section))
        weights = dict(engine.named_weights())
        is_equal = all(torch.equal(weight, expected[name]) for name, weight in weights.items())
        buffers = {buffer.dtype for part in engine._parts for buffer in part.buffers() if buffer.is_floating_point()}
        engine.forward_backward(mine(engine, ragged_batch(6)), sft())
        return is_equal and len(weights) == len(expected), buffers, engine.optim_step().grad_norm

    *_, norm = fn(ONE)
    for is_equal, buffers, found in run(mesh, lambda _: fn(mesh)):
        assert is_equal
        assert buffers == {torch.float32}
        assert found == pytest.approx(norm, rel=1e-6)


def test_two_engines_share_the_group_of_one() -> None:
    first, second = (make_engine(ONE, setting(compute_dtype="bfloat16")) for _ in range(2))
    first.close()
    assert dist.is_initialized()
    second.forward_backward(ragged_batch(3), sft())
    second.close()
    assert not dist.is_initialized()


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    engine = make_engine(ONE, setting())
    batch = ragged_batch(3)
    engine.forward_backward(batch, sft())
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    next(engine._parts[0].parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
    stats = engine.optim_step()
    assert stats.is_skipped
    assert all(torch.equal(weight, before[name]) for name, weight in engine.named_weights())
    engine.forward_backward(batch, sft())
    assert not engine.optim_step().is_skipped, "the gradient that was not finite is gone"


def test_a_skip_on_one_rank_is_a_skip_on_all() -> None:
    def fn(rank: int) -> tuple[bool, bool]:
        engine = make_engine(Mesh("fsdp", 2), setting())
        engine.forward_backward(mine(engine, ragged_batch(4)), sft())
        before = {name: weight.clone() for name, weight in engine.named_weights()}
        if rank == 1:
            next(engine._parts[0].parameters()).grad.to_local().fill_(math.nan)  # type: ignore[union-attr]
        stats = engine.optim_step()
        return stats.is_skipped, all(torch.equal(weight, before[name]) for name, weight in engine.named_weights())

    assert run(Mesh("fsdp", 2), fn) == [(True, True)] * 2


def test_gradients_add_up_over_calls() -> None:
    """Two halves in two calls, each under the whole batch's counts, are one step."""
    batch = ragged_batch(6)
    halves = [batch.select([0, 1, 2]), batch.select([3, 4, 5])]
    weights = [int(half.loss_mask.sum()) / int(batch.loss_mask.sum()) for half in halves]
    whole, parts = make_engine(ONE, setting()), make_engine(ONE, setting())
    whole.forward_backward(batch, sft())
    for half, weight in zip(halves, weights, strict=True):
        scaled = half.advantages * weight  # undoes the division by the half's own count
        parts.forward_backward(replace(half, advantages=scaled), sft())
    assert parts.optim_step().grad_norm == pytest.approx(whole.optim_step().grad_norm, rel=1e-6)


@pytest.mark.parametrize(
    ("mesh", "fields", "message"),
    [
        (Mesh("fsdp", 1, {"tp": 2}), {}, "must divide the number of ranks"),
        (Mesh("fsdp", 1, {"dp_replicate": 3}), {}, "must divide the number of ranks"),
        (ONE, {"compute_dtype": "float16"}, "nothing scales the loss"),
    ],
)
def test_what_cannot_be_done_is_refused(mesh: Mesh, fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(mesh, setting(**fields))  # type: ignore[arg-type]


def test_heads_that_do_not_divide_are_refused() -> None:
    def fn(_: int) -> str:
        with pytest.raises(ConfigError) as raised:
            make_engine(Mesh("fsdp", 2, {"tp": 2}), setting(num_attention_heads=3, num_key_value_heads=3))
        return str(raised.value)

    messages = run(Mesh("fsdp", 2), fn)
    assert "num_attention_heads, 3" in messages[0]
    assert "num_key_value_heads, 3" in messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "cohere2", "olmo2", "phi3", "starcoder2"])
def test_tensor_parallel_plans_of_other_architectures(model_type: str) -> None:
    """The norm of the gradient before the first step shows a part that was not summed."""
    unset: dict[str, Any] = {} if model_type in ("llama", "gemma2", "gemma3_text", "cohere2") else {"head_dim": ...}
    how = setting(model_type, **unset)
    engine = make_engine(ONE, how)
    engine.forward_backward(ragged_batch(6), sft())
    expected = engine.optim_step().grad_norm

    def fn(_: int) -> float:
        engine = make_engine(Mesh("fsdp", 2, {"tp": 2}), how)
        engine.forward_backward(ragged_batch(6), sft())
        return engine.optim_step().grad_norm

    assert run(Mesh("fsdp", 2), fn) == pytest.approx([expected] * 2, rel=2e-6)
