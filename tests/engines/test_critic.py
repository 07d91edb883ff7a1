"""The same engines with a value head in place of the vocabulary's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.algorithms.base import LossInputs, Needs
from ebbtide.types import Ratio
from tests.contracts.engines import Mesh, make_engine, mine, ragged_batch, run, setting

ONE = Mesh("fsdp", 1)
TWO = [Mesh("fsdp", 2), Mesh("pipeline", 2, {"pp": 2})]


class SquaredError:
    """Values shall be the advantages."""

    needs = Needs.NOTHING

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Ratio]]:
        assert inputs.values is not None
        mask_T = inputs.batch.loss_mask
        errors_T = torch.where(mask_T, inputs.values - inputs.batch.advantages, 0.0) ** 2
        return errors_T.sum() / inputs.counts.num_tokens, {}


def learned(mesh: Mesh, num_steps: int = 4, **options: Any) -> list[tuple[list[float], float]]:
    """Norms of the steps, and the sum of the values after them, over this rank's sequences."""

    def fn(_: int) -> tuple[list[float], float]:
        engine = make_engine(mesh, replace(setting(), answer="value"), **options)
        own, norms = mine(engine, ragged_batch(6)), []
        assert not bool(engine.logprobs(own).any()), "values begin at 0"
        for _ in range(num_steps):
            engine.forward_backward(own, SquaredError())
            norms.append(engine.optim_step().grad_norm)
        return norms, float(engine.logprobs(own).sum())

    return run(mesh, fn)


@pytest.mark.parametrize("mesh", TWO, ids=str)
def test_a_critic_learns_the_same_on_every_mesh(mesh: Mesh) -> None:
    ((norms, values),) = learned(ONE)
    found = learned(mesh)
    total = found[0][1] if mesh.engine == "pipeline" else sum(value for _, value in found)
    assert total == pytest.approx(values, rel=1e-3)
    for rank in found:
        assert rank[0] == pytest.approx(norms, rel=1e-4)


def test_a_critic_with_adapters_learns() -> None:
    """Its head is trained whole: frozen at zeros it would hold every gradient back."""
    ((norms, values),) = learned(ONE, lora={"rank": 2})
    assert all(norm > 0 for norm in norms)
    assert values != 0
