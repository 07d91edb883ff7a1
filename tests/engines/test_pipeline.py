"""The engine `pipeline` beyond the contract that all engines share."""

from typing import Any

import pytest
import torch

from ebbtide.errors import ConfigError
from tests.contracts.engines import Mesh, make_engine, mine, ragged_batch, run, setting, sft

ONE = Mesh("fsdp", 1)
TWO = Mesh("pipeline", 2, {"pp": 2})


def test_every_rank_gets_every_output() -> None:
    def fn(_: int) -> list[tuple[tuple[int, ...], float, list[float], dict[str, float | None]]]:
        engine = make_engine(TWO, setting())
        outputs = engine.forward_backward(ragged_batch(9), sft())
        return [
            (o.sequences, float(o.loss), o.logprobs.tolist(), {name: r.value for name, r in o.metrics.items()})
            for o in outputs
        ]

    first, last = run(TWO, fn)
    assert first == last
    assert sorted(b for sequences, *_ in first for b in sequences) == list(range(9))


def test_microbatches_of_any_length_in_any_order() -> None:
    """Also from one batch to the next: nothing is sized by what came before."""

    def fn(mesh: Mesh) -> list[float]:
        engine = make_engine(mesh, setting(), max_tokens=20)
        norms = []
        for num, seed in ((9, 1), (2, 2), (14, 3)):
            engine.forward_backward(ragged_batch(num, seed), sft())
            norms.append(engine.optim_step().grad_norm)
        return norms

    expected = fn(ONE)
    for found in run(TWO, lambda _: fn(TWO)):
        assert found == pytest.approx(expected, rel=1e-5)


def test_stages_hold_their_layers_and_no_others() -> None:
    def fn(_: int) -> list[str]:
        engine = make_engine(TWO, setting(num_layers=3, tie_word_embeddings=False))
        return [name for name, _ in engine._own_weights()]

    first, last = run(TWO, fn)
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}
    assert {name.split(".")[2] for name in last if ".layers." in name} == {"2"}
    assert "model.embed_tokens.weight" in first
    assert {"model.norm.weight", "lm_head.weight"} <= set(last)
    assert not set(first) & set(last)


def test_a_tied_head_stays_equal_to_its_embedding() -> None:
    def fn(rank: int) -> torch.Tensor:
        engine = make_engine(TWO, setting(tie_word_embeddings=True))
        for _ in range(3):
            engine.forward_backward(ragged_batch(5), sft())
            engine.optim_step()
        model = engine._parts[0].model
        module = model.get_input_embeddings() if rank == 0 else model.get_output_embeddings()
        weight: torch.Tensor = module.weight.detach().clone()
        return weight

    embedding, head = run(TWO, fn)
    assert torch.equal(embedding, head)


def test_mixed_precision_travels_in_the_compute_dtype() -> None:
    def fn(mesh: Mesh) -> tuple[float, float]:
        engine = make_engine(mesh, setting(compute_dtype="bfloat16"))
        outputs = engine.forward_backward(mine(engine, ragged_batch(6)), sft())
        norm = engine.optim_step().grad_norm
        engine.close()
        return sum(float(output.loss) for output in outputs), norm

    expected = fn(ONE)
    for found in run(TWO, lambda _: fn(TWO)):
        assert found == pytest.approx(expected, rel=2e-2)


def test_interleaving_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no effect on one rank"):
        make_engine(Mesh("pipeline", 1, {"pp": 1, "stages_per_rank": 2}), setting())


def test_more_stages_than_layers_are_refused() -> None:
    def fn(_: int) -> str:
        with pytest.raises(ConfigError) as raised:
            make_engine(Mesh("pipeline", 2, {"pp": 2, "stages_per_rank": 2}), setting(num_layers=3))
        return str(raised.value)

    assert "the model has 3 layers, and each stage needs one" in run(TWO, fn)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["llama", "gemma2", "gemma3_text", "cohere2", "granite", "olmo2", "phi3", "qwen3_moe", "smollm3"]
)
@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_other_architectures_are_cut_alike(model_type: str, stages_per_rank: int) -> None:
    """Scaled embeddings, layers of two kinds, norms after blocks, experts: one step is that of one device."""
    unset: dict[str, Any] = {} if model_type in ("llama", "gemma2", "gemma3_text", "cohere2") else {"head_dim": ...}
    how = setting(model_type, num_layers=4, **unset)

    def fn(mesh: Mesh) -> float:
        engine = make_engine(mesh, how)
        engine.forward_backward(ragged_batch(6), sft())
        return engine.optim_step().grad_norm

    expected = fn(ONE)
    mesh = Mesh("pipeline", 2, {"pp": 2, "stages_per_rank": stages_per_rank})
    assert run(mesh, lambda _: fn(mesh)) == pytest.approx([expected] * 2, rel=1e-6)
