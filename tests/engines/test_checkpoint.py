"""Saving and loading beyond the contract: what is refused, and what a fresh start looks like."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ebbtide.errors import CheckpointError
from tests.contracts.engines import Mesh, make_engine, ragged_batch, setting, sft

ONE = Mesh("fsdp", 1)


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    batch = ragged_batch(6)
    whole = make_engine(ONE, setting())
    for _ in range(4):
        whole.forward_backward(batch, sft())
        expected = whole.optim_step()
        if whole._num_steps_done == 2:
            whole.save(tmp_path / "two")
    resumed = make_engine(ONE, replace(setting(), seed=5))
    resumed.load(tmp_path / "two")
    for _ in range(2):
        resumed.forward_backward(batch, sft())
        found = resumed.optim_step()
    assert found == expected
    pairs = zip(whole.named_weights(), resumed.named_weights(), strict=True)
    assert all(torch.equal(old, new) for (_, old), (_, new) in pairs)


def test_before_the_first_step_there_is_no_optimizer_state(tmp_path: Path) -> None:
    """And what the loading engine had is forgotten."""
    make_engine(ONE, setting()).save(tmp_path / "fresh")
    engine = make_engine(ONE, setting())
    engine.forward_backward(ragged_batch(3), sft())
    engine.optim_step()
    engine.load(tmp_path / "fresh")
    assert not engine._optimizer.state
    assert engine._num_steps_done == 0


def test_saving_again_replaces(tmp_path: Path) -> None:
    engine = make_engine(ONE, setting())
    engine.save(tmp_path / "same")
    engine.forward_backward(ragged_batch(3), sft())
    engine.optim_step()
    engine.save(tmp_path / "same")
    other = make_engine(ONE, setting())
    other.load(tmp_path / "same")
    assert other._num_steps_done == 1


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        make_engine(ONE, setting()).load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"num_layers": 3}, r"lacks \d+ of this model's tensors"), ({"intermediate_size": 48}, "does not fit this model")],
)
def test_another_models_checkpoint_is_an_error(fields: dict[str, int], message: str, tmp_path: Path) -> None:
    make_engine(ONE, setting()).save(tmp_path / "other")
    with pytest.raises(CheckpointError, match=message):
        make_engine(ONE, setting(**fields)).load(tmp_path / "other")  # type: ignore[arg-type]
