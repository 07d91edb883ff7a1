"""The contract of training engines, over every engine and its meshes."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from ebbtide import plugins
from ebbtide.engines.base import EngineSetting
from ebbtide.engines.mesh_engine import MeshEngine
from ebbtide.errors import DataError, EngineError
from ebbtide.memory.live import LiveStorages
from ebbtide.models.build import build_model
from ebbtide.recipe import OptimSection
from tests.contracts.engines import (
    MESHES,
    Mesh,
    NestedLoss,
    check_leaves_nothing,
    make_engine,
    mine,
    ragged_batch,
    run,
    setting,
    sft,
)

_EVERY = [mesh for meshes in MESHES.values() for mesh in meshes]


def _params(meshes: list[Mesh], *, slow: str = "") -> list[ParameterSet]:
    """slow: an option whose meshes are left to the slow tests as well."""
    is_slow = {mesh: not mesh.is_core or slow in mesh.options for mesh in meshes}
    return [pytest.param(mesh, marks=[pytest.mark.slow] * is_slow[mesh], id=str(mesh)) for mesh in meshes]


ALL = _params(_EVERY)
# Tensor parallelism compiles its plan in each process anew, which takes seconds; what it changes, gradients and
# memory, is looked at in ALL.
CORE = _params([mesh for mesh in _EVERY if mesh.is_core and "tp" not in mesh.options])
LORA: dict[str, Any] = {"lora": {"rank": 2}}
ONE = Mesh("fsdp", 1)
# One step of it moves a weight by g / (1 + |g|): updated weights show gradients, not their signs.
PLAIN_STEP = OptimSection(lr=1.0, eps=1.0, max_grad_norm=0.5)


def test_every_engine_has_meshes() -> None:
    assert set(plugins.names("engines")) == set(MESHES)


@pytest.mark.parametrize("mesh", _params(_EVERY, slow="tp"))
def test_nothing_of_a_microbatch_stays(mesh: Mesh) -> None:
    check_leaves_nothing(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", CORE)
@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_nothing_stays_with_activation_checkpointing(mesh: Mesh, compute_dtype: str | None) -> None:
    check_leaves_nothing(mesh, activation_checkpointing=True, compute_dtype=compute_dtype)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh("pipeline", 2, {"pp": 2}), id="pipeline-2"),
        pytest.param(ONE, id="fsdp-1", marks=pytest.mark.slow),
        pytest.param(Mesh("fsdp", 2), id="fsdp-2", marks=pytest.mark.slow),
    ],
)
def test_nothing_stays_with_adapters_over_inputs_that_require_grad(mesh: Mesh) -> None:
    check_leaves_nothing(mesh, activation_checkpointing=True, **LORA)


def steps(mesh: Mesh, how: EngineSetting, num_steps: int, num_sequences: int = 13, **options: Any) -> dict[str, Any]:
    """What training on the mesh gives: losses and norms of the steps, log-probs before, and weights after."""
    batch = ragged_batch(num_sequences)

    def train(_: int) -> dict[str, Any]:
        engine = make_engine(mesh, how, **options)
        own = mine(engine, batch)
        found: dict[str, Any] = {"place": engine.data_place[0], "logprobs": engine.logprobs(own), "losses": []}
        found["norms"] = []
        for step in range(num_steps):
            outputs = engine.forward_backward(own, sft())
            found["losses"].append(sum(float(output.loss) for output in outputs))
            if step == 0:
                found["trained"] = [output.logprobs for output in outputs]
                found["sequences"] = [output.sequences for output in outputs]
            found["norms"].append(engine.optim_step().grad_norm)
        found["weights"] = {name: weight.clone() for name, weight in engine.named_weights()}
        engine.close()
        return found

    by_rank = run(mesh, train)
    num = max(found["place"] for found in by_rank) + 1
    by_place = {found["place"]: found for found in by_rank}
    assert len(by_place) == num
    for found in by_rank:  # ranks that hold the same sequences agree on everything, and all ranks on the weights
        peer = by_place[found["place"]]
        assert found["losses"] == peer["losses"]
        assert found["norms"] == by_rank[0]["norms"]
        assert all(torch.equal(weight, by_rank[0]["weights"][name]) for name, weight in found["weights"].items())
        assert all(torch.equal(*pair) for pair in zip(found["trained"], peer["trained"], strict=True))
    logprobs = [found["logprobs"] for _, found in sorted(by_place.items())]
    losses = [sum(found["losses"][step] for found in by_place.values()) for step in range(num_steps)]
    return {**by_rank[0], "losses": losses, "logprobs": logprobs}


@pytest.fixture(scope="module")
def on_one_device() -> Callable[..., dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}

    def reference(num_sequences: int = 13, **fields: Any) -> dict[str, Any]:
        key = repr((num_sequences, sorted(fields.items())))
        if key not in made:
            made[key] = steps(ONE, setting(optim=PLAIN_STEP, **fields), 2, num_sequences)
        return made[key]

    return reference


@pytest.mark.parametrize("tie", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
@pytest.mark.parametrize("mesh", _params([mesh for mesh in _EVERY if mesh.world > 1]))
def test_every_mesh_computes_what_one_device_computes(
    mesh: Mesh, tie: bool, on_one_device: Callable[..., dict[str, Any]]
) -> None:
    """The first step shows the gradient, norms over heads and a tied head included; the second that ranks agree."""
    fields: dict[str, Any] = {"tie_word_embeddings": tie, "num_layers": 4 if mesh.is_deep else 2}
    expected = on_one_device(**fields)
    found = steps(mesh, setting(optim=PLAIN_STEP, **fields), 2)
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-6, atol=0)
    assert list(found["weights"]) == list(expected["weights"])
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-6, atol=2e-6, msg=name)


@pytest.mark.parametrize("mesh", CORE)
def test_a_batch_smaller_than_the_number_of_ranks(mesh: Mesh, on_one_device: Callable[..., dict[str, Any]]) -> None:
    """One sequence: other ranks have none, and still take part."""
    expected = on_one_device(1)
    found = steps(mesh, setting(optim=PLAIN_STEP), 2, num_sequences=1)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-6, atol=2e-6, msg=name)


@pytest.mark.parametrize("mesh", CORE)
def test_log_probs_without_gradient_are_those_of_training_and_runs_repeat(mesh: Mesh) -> None:
    first, second = (steps(mesh, setting(), 1, max_tokens=24) for _ in range(2))
    assert first["losses"] == second["losses"], "a run's losses are bit-identical to those of the run before"
    assert first["norms"] == second["norms"]
    batch = ragged_batch(13)
    num = len(first["logprobs"])
    scored = dict(enumerate(first["logprobs"][0].split(batch.select(list(range(0, 13, num))).lengths.tolist())))
    for sequences, trained_T in zip(first["sequences"], first["trained"], strict=True):
        assert torch.equal(torch.cat([scored[b] for b in sequences]), trained_T)


@pytest.mark.parametrize("mesh", CORE)
@pytest.mark.parametrize("is_offloaded", [False, True], ids=["resident", "offloaded"])
def test_weights_leave_one_by_one_under_their_names(mesh: Mesh, is_offloaded: bool) -> None:
    how = setting()
    original = dict(build_model(how.model, dtype=torch.float32, seed=how.seed).named_parameters())
    largest = max(weight.nbytes for weight in original.values())

    def export(_: int) -> tuple[list[str], bool, int]:
        engine = make_engine(mesh, how)
        if is_offloaded:
            engine.offload("weights", "optimizer")
        with LiveStorages() as live:
            names, are_equal = [], True
            for name, weight in engine.named_weights():
                names.append(name)
                are_equal = are_equal and torch.equal(weight, original[name])
                del weight
        peak = live.peak_bytes
        engine.onload("weights", "optimizer")
        engine.close()
        return names, are_equal, peak

    for names, are_equal, peak in run(mesh, export):
        assert names == list(original)
        assert are_equal
        assert peak <= 3 * largest, f"gathering takes {peak} bytes; the largest weight has {largest}"


@pytest.mark.parametrize("mesh", CORE)
def test_offload_and_onload_change_nothing(mesh: Mesh) -> None:
    batch = ragged_batch(7)

    def train(is_moved: bool) -> Callable[[int], tuple[list[float], list[Tensor]]]:
        def fn(_: int) -> tuple[list[float], list[Tensor]]:
            engine = make_engine(mesh, setting())
            own, norms = mine(engine, batch), []
            for _ in range(3):
                if is_moved:
                    engine.offload("optimizer")
                    engine.offload("weights", "optimizer")
                    engine.onload("weights")
                engine.forward_backward(own, sft())
                engine.onload("optimizer")
                norms.append(engine.optim_step().grad_norm)
            weights = [weight.clone() for _, weight in engine.named_weights()]
            engine.close()
            return norms, weights

        return fn

    moved, stayed = run(mesh, train(True))[0], run(mesh, train(False))[0]
    assert moved[0] == stayed[0]
    assert all(torch.equal(*pair) for pair in zip(moved[1], stayed[1], strict=True))


SAVED = [
    (Mesh("fsdp", 4, {"tp": 2}), ONE),
    (ONE, Mesh("fsdp", 2)),
    (Mesh("pipeline", 2, {"pp": 2}), Mesh("fsdp", 2)),
    (Mesh("fsdp", 2, {"tp": 2}), Mesh("pipeline", 2, {"pp": 2})),
    (Mesh("pipeline", 4, {"pp": 2}), Mesh("fsdp", 2, {"dp_replicate": 2})),
]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(*pair, id=f"{pair[0]}-to-{pair[1]}", marks=[] if number < 3 else [pytest.mark.slow])
        for number, pair in enumerate(SAVED)
    ],
)
@pytest.mark.parametrize("num_steps", [1])
def test_what_one_mesh_saves_another_loads_bit_by_bit(
    saved: Mesh, loaded: Mesh, num_steps: int, tmp_path: Path
) -> None:
    """Optimizer included: what the second mesh saves again is the same to the bit, on one device."""
    batch = ragged_batch(7)

    def save(_: int) -> list[Tensor]:
        engine = make_engine(saved, setting())
        for _ in range(num_steps):
            engine.forward_backward(mine(engine, batch), sft())
            engine.optim_step()
        engine.save(tmp_path / "first")
        return [weight.clone() for _, weight in engine.named_weights()]

    def load_and_save(_: int) -> list[Tensor]:
        engine = make_engine(loaded, replace(setting(), seed=1))
        engine.load(tmp_path / "first")
        engine.save(tmp_path / "second")
        return [weight.clone() for _, weight in engine.named_weights()]

    weights, again = run(saved, save)[0], run(loaded, load_and_save)[0]
    assert all(torch.equal(*pair) for pair in zip(weights, again, strict=True))
    states = []
    for name in ("first", "second"):
        engine = make_engine(ONE, replace(setting(), seed=2))
        engine.load(tmp_path / name)
        states.append(_everything(engine))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert any(name.endswith("exp_avg_sq") and bool(value.any()) for name, value in states[0].items())


def _everything(engine: MeshEngine) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {"steps": torch.tensor(engine._num_steps_done)}
    for name, weight in engine._own_weights():
        found[name] = weight.detach()
        found.update({f"{name}.{key}": value for key, value in engine._optimizer.state[weight].items()})
    return found


@pytest.mark.parametrize("mesh", CORE)
def test_no_garbage_is_collected(mesh: Mesh) -> None:
    """A full collection takes a pause of seconds in a real process, and hides what should not be there."""
    batch = ragged_batch(7)

    def train(_: int) -> int:
        engine = make_engine(mesh, setting())
        own = mine(engine, batch)
        collections: list[int] = []

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                collections.append(info["generation"])

        for step in range(2):
            if step == 1:  # what happens once, imports for one, has happened
                gc.callbacks.append(note)
                gc.disable()
            try:
                engine.onload("weights", "optimizer")
                engine.forward_backward(own, sft())
                engine.optim_step()
                engine.offload("weights", "optimizer")
            finally:
                gc.enable()
        gc.callbacks.remove(note)
        return len(collections)

    assert run(mesh, train) == [0] * mesh.world


@pytest.mark.parametrize(
    ("mesh", "compute_dtype"),
    [(ONE, None), (ONE, "bfloat16"), (Mesh("fsdp", 2), None), (Mesh("pipeline", 2, {"pp": 2}), None)],
    ids=lambda value: str(value),
)
def test_close_gives_all_memory_back(mesh: Mesh, compute_dtype: str | None) -> None:
    """Though nobody collects what is left of the engine's objects."""
    batch = ragged_batch(7)

    def use(_: int) -> int:
        gc.collect()
        gc.disable()
        try:
            with LiveStorages() as live:
                engine = make_engine(mesh, setting(compute_dtype=compute_dtype))
                own = mine(engine, batch)
                engine.forward_backward(own, sft())
                engine.optim_step()
                engine.logprobs(own)
                del own
                engine.close()
            return live.current_bytes
        finally:
            gc.enable()

    assert max(run(mesh, use)) <= 1024, "of 42 kB of weights at least; a last message may still be on its way"


@pytest.mark.parametrize("mesh", CORE)
def test_a_sequence_beyond_the_budget_is_an_error_on_every_rank(mesh: Mesh) -> None:
    """The rank that has it says what to do, and no other is left waiting for it."""
    batch = ragged_batch(8)
    longest = int(batch.lengths.argmax())
    order = [longest, *(b for b in range(8) if b != longest)]

    def train(_: int) -> tuple[int, str]:
        engine = make_engine(mesh, setting(), max_tokens=int(batch.lengths.max()) - 1)
        with pytest.raises((DataError, EngineError)) as raised:
            engine.forward_backward(mine(engine, batch.select(order)), sft())
        return engine.data_place[0], str(raised.value)

    for place, message in run(mesh, train):
        if place == 0:
            assert "a sequence is never split" in message
            assert "Raise the microbatch's token budget" in message


@pytest.mark.parametrize("mesh", CORE)
def test_outputs_are_sealed_and_metrics_arrive(mesh: Mesh) -> None:
    batch = ragged_batch(7)

    def train(_: int) -> tuple[int, list[bool], float, int]:
        engine = make_engine(mesh, setting())
        outputs = engine.forward_backward(mine(engine, batch), NestedLoss())
        ratios = [output.metrics["live/entropy_nats"] for output in outputs]
        live = [tensor.requires_grad for ratio in ratios for tensor in (ratio.total, ratio.count)]
        live += [output.loss.requires_grad or output.logprobs.requires_grad for output in outputs]
        entropies = sum(float(output.entropy.sum()) for output in outputs if output.entropy is not None)
        assert entropies == pytest.approx(sum(float(ratio.total) for ratio in ratios), rel=1e-6)
        return engine.data_place[0], live, entropies, sum(len(output.sequences) for output in outputs)

    by_place = {found[0]: found[1:] for found in run(mesh, train)}
    assert not any(is_live for live, _, _ in by_place.values() for is_live in live)
    assert sum(num for _, _, num in by_place.values()) == 7
    assert all(entropy > 0 for _, entropy, _ in by_place.values())
