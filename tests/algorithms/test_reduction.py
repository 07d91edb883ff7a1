import pytest
import torch

from ebbtide.algorithms.reduction import Aggregation
from ebbtide.types import BatchCounts
from tests.algorithms.cases import packed_of


def test_trained_cuts_values_and_gradients_off() -> None:
    packed = packed_of([1, 2])
    values_T = torch.tensor([torch.nan, torch.inf, 1.0, torch.nan, torch.nan, 2.0, 3.0], requires_grad=True)
    trained_T = packed.trained(values_T)
    assert trained_T.tolist() == [0, 0, 1, 0, 0, 2, 3]
    (gradient,) = torch.autograd.grad((trained_T**2).sum(), values_T)
    assert gradient.tolist() == [0, 0, 2, 0, 0, 4, 6]


def test_sums_and_means_of_sequences() -> None:
    packed = packed_of([1, 0, 2])
    values_T = torch.tensor([0, 0, 5.0, 0, 0, 0, 0, 1.0, 2.0])
    assert packed.per_sequence(values_T).tolist() == [5, 0, 3]
    assert packed.mean_per_sequence(values_T).tolist() == [5, 0, 1.5]
    assert packed.mean(values_T).value == pytest.approx(8 / 3)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 8 / 30), ("sequence_mean", 6.5 / 10), ("sequence_sum", 8 / 10), ("constant", 8 / 40)],
)
def test_shares_divide_by_global_counts(aggregation: Aggregation, expected: float) -> None:
    packed = packed_of([1, 0, 2])
    loss_T = torch.tensor([0, 0, 5.0, 0, 0, 0, 0, 1.0, 2.0])
    counts = BatchCounts(num_tokens=30, num_sequences=10, max_completion_tokens=4)
    assert packed.share_of_loss(loss_T, counts, aggregation).item() == pytest.approx(expected)
    assert packed.share_of_loss(loss_T, BatchCounts(0, 0, 4), aggregation).isfinite()
