import math

import pytest
import torch
from torch import Tensor

from ebbtide.algorithms.correction import Correction, correct, effective_sample_ratio
from ebbtide.algorithms.reduction import Packed
from ebbtide.config import validate
from ebbtide.errors import ConfigError
from tests.algorithms.cases import packed_of


def weights(log_ratios: list[list[float]], **settings: object) -> tuple[list[float], dict[str, float | None]]:
    """Weights of the trained tokens of completions with these log ratios, and the metrics' values."""
    packed = packed_of([len(sequence) for sequence in log_ratios])
    log_ratio_T = torch.zeros(len(packed.loss_mask))
    log_ratio_T[packed.loss_mask] = torch.tensor([x for sequence in log_ratios for x in sequence])
    weights_T, metrics = correct(log_ratio_T, packed, validate(Correction, settings))
    assert not weights_T[~packed.loss_mask].any()
    return weights_T[packed.loss_mask].tolist(), {name: ratio.value for name, ratio in metrics.items()}


RATIOS = [[math.log(3), math.log(0.5)], [math.log(1.5)]]


def test_off_measures_and_changes_nothing() -> None:
    found, metrics = weights(RATIOS)
    assert found == [1, 1, 1]
    assert metrics["correction/ratio_mean"] == pytest.approx(5 / 3)
    assert metrics["correction/ratio_square_mean"] == pytest.approx((9 + 0.25 + 2.25) / 3)
    assert metrics["correction/truncated_ratio"] == 0
    assert metrics["correction/rejected_ratio"] == 0
    # KL(rollout || policy) a token: r - 1 - log r.
    assert metrics["correction/kl_nats"] == pytest.approx((5 - 3 - math.log(3 * 0.5 * 1.5)) / 3)


def test_truncated_at_each_level() -> None:
    token, metrics = weights(RATIOS, weight="token")
    assert token == pytest.approx([2, 0.5, 1.5])
    assert metrics["correction/truncated_ratio"] == pytest.approx(1 / 3)
    sequence, _ = weights(RATIOS, weight="sequence", max_weight=1.2)
    assert sequence == pytest.approx([1.2, 1.2, 1.2])  # products 1.5 and 1.5
    mean, _ = weights(RATIOS, weight="sequence_mean")
    assert mean == pytest.approx([math.sqrt(1.5), math.sqrt(1.5), 1.5])


def test_masked_at_each_level() -> None:
    token, metrics = weights(RATIOS, weight="token", reject="token", reject_below=0.6)
    assert token == pytest.approx([0, 0, 1.5])
    assert metrics["correction/rejected_ratio"] == pytest.approx(2 / 3)
    sequence, _ = weights([[math.log(3), math.log(3)], [math.log(1.5)]], reject="sequence", reject_above=8.0)
    assert sequence == [0, 0, 1]
    mean, _ = weights([[math.log(3), math.log(3)], [math.log(1.5)]], reject="sequence_mean", reject_above=2.9)
    assert mean == [0, 0, 1]


def test_a_veto_takes_the_whole_sequence() -> None:
    found, metrics = weights([[0.0, math.log(1e-5), 0.0], [0.0]], veto_below=1e-4)
    assert found == [0, 0, 0, 1]
    assert metrics["correction/rejected_ratio"] == pytest.approx(3 / 4)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_extreme_ratios_stay_finite(level: str) -> None:
    found, metrics = weights([[1e4, 1e4], [-1e4], [80.0]], weight=level)
    assert found == pytest.approx([2, 2, 0, 2], abs=1e-8)
    assert all(value is not None and math.isfinite(value) for value in metrics.values())


def test_effective_samples_by_hand() -> None:
    packed = packed_of([2, 1])

    def share(trained: list[float]) -> float | None:
        weights_T: Tensor = torch.zeros(len(packed.loss_mask))
        weights_T[packed.loss_mask] = torch.tensor(trained, dtype=torch.float32)
        return effective_sample_ratio(weights_T, packed).value

    assert share([1, 1, 1]) == pytest.approx(1)
    assert share([1, 0, 0]) == pytest.approx(1 / 3)
    assert share([2, 1, 1]) == pytest.approx(16 / 18)
    assert share([0, 0, 0]) is None


def test_weights_carry_no_gradient() -> None:
    packed = Packed(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
    log_ratio_T = torch.tensor([0.1, 0.2], requires_grad=True)
    weights_T, metrics = correct(log_ratio_T, packed, Correction(weight="sequence"))
    assert not weights_T.requires_grad
    assert not any(ratio.total.requires_grad for ratio in metrics.values())


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"max_weight": 3.0}, "max_weight=3.0: has no effect with weight='none'"),
        ({"normalize": True}, "normalize=True: has no effect with weight='none'"),
        ({"reject_above": 3.0}, "reject_above=3.0: has no effect with reject='none'"),
        ({"reject": "token", "reject_below": 2.5}, "reject_below=2.5: must be below reject_above=2.0"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        validate(Correction, settings)
