"""AdamW over meshes, its schedules, norms and scaling."""

import math

import pytest
import torch
from torch import nn

from ebbtide.device import Device
from ebbtide.engines.mesh import Axes, Ranks
from ebbtide.engines.optim import gradient_norm, lr_factor, make_optimizer, scale_gradients
from ebbtide.recipe import OptimSection

RANKS = Ranks(Device("cpu"), Axes(), needs_mesh=False)


def parameter(values: list[float], gradient: list[float] | None) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values))
    made.grad = None if gradient is None else torch.tensor(gradient)
    return made


def test_the_norm_is_over_all_gradients_that_there_are() -> None:
    parameters = [parameter([0.0, 0.0], [3.0, 0.0]), parameter([0.0], [4.0]), parameter([0.0], None)]
    assert gradient_norm(parameters, RANKS) == 5.0
    assert gradient_norm([], RANKS) == 0.0


def test_scaling_is_in_place() -> None:
    parameters = [parameter([0.0], [2.0]), parameter([0.0], None)]
    gradient = parameters[0].grad
    scale_gradients(parameters, 0.25)
    assert parameters[0].grad is gradient
    assert gradient is not None
    assert gradient.tolist() == [0.5]
    assert parameters[1].grad is None


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_has_no_finite_norm(value: float) -> None:
    assert not math.isfinite(gradient_norm([parameter([0.0], [value]), parameter([0.0], [1.0])], RANKS))


def test_weight_decay_is_for_matrices() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = make_optimizer([matrix, vector, frozen], OptimSection(lr=0.1, weight_decay=0.5))
    decays = {id(item): group["weight_decay"] for group in optimizer.param_groups for item in group["params"]}
    assert decays == {id(matrix): 0.5, id(vector): 0.0}


def test_one_step_by_hand() -> None:
    """AdamW's first step moves by lr whatever the gradient's size: m / sqrt(v) = g / |g|."""
    weight = parameter([1.0, 1.0], [0.5, -2.0])
    optimizer = make_optimizer([weight], OptimSection(lr=0.1, eps=1e-12))
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 1.1]))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "min_lr_ratio": 0.5}, [1.0, 0.875, 0.75, 0.625]),
        ({"schedule": "cosine"}, [1.0, 0.8535534, 0.5, 0.1464466]),
        ({"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.5]),
    ],
)
def test_schedules_by_hand(fields: dict[str, object], expected: list[float]) -> None:
    optim = OptimSection(lr=1.0, **fields)
    assert [lr_factor(optim, step, 4) for step in range(4)] == pytest.approx(expected)


def test_beyond_its_end_a_schedule_stays_where_it_ended() -> None:
    assert lr_factor(OptimSection(lr=1.0, schedule="cosine", min_lr_ratio=0.1), 9, 4) == pytest.approx(0.1)
