import pytest
import torch

from ebbtide.algorithms.grpo import GRPO
from ebbtide.algorithms.surrogate import clipped_surrogate
from ebbtide.config import validate
from tests.algorithms.cases import packed_of


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.0),
        (1.5, 2.0, -2.6, 0.0),  # held at 1.3
        (0.5, 2.0, -1.0, -2.0),  # a praised token may always rise
        (0.5, -2.0, 1.6, 0.0),  # held at 0.8
        (1.5, -2.0, 3.0, 2.0),  # a blamed token may always fall
        (3.0, -2.0, 4.0, 0.0),  # held by the dual bound, 2
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_each_branch_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    config = validate(GRPO.Config, {"type": "grpo", "clip_low": 0.2, "clip_high": 0.3, "clip_dual": 2.0})
    ratio_T = torch.tensor([1.0, 1.0, ratio], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([0.0, 0.0, advantage], dtype=torch.float64)
    loss_T, _ = clipped_surrogate(ratio_T, advantages_T, packed_of([1]), config)
    assert loss_T.tolist() == pytest.approx([0, 0, loss])
    assert torch.autograd.grad(loss_T.sum(), ratio_T)[0].tolist() == pytest.approx([0, 0, slope])


def test_shares_count_trained_tokens_that_a_bound_holds() -> None:
    config = validate(GRPO.Config, {"type": "grpo", "clip_dual": 3.0})
    packed = packed_of([4])
    ratio_T = torch.tensor([1.0, 1.0, 1.5, 0.5, 4.0, 1.0])
    advantages_T = torch.tensor([0.0, 0.0, 1.0, -1.0, -1.0, 1.0])
    _, metrics = clipped_surrogate(ratio_T, advantages_T, packed, config)
    assert {key: ratio.value for key, ratio in metrics.items()} == {
        "policy/ratio_mean": 1.75,
        "policy/clipped_high_ratio": 0.25,
        "policy/clipped_low_ratio": 0.25,
        "policy/clipped_dual_ratio": 0.25,
    }
