import doctest

import pytest

from ebbtide.observe import interval
from ebbtide.observe.interval import wilson_interval


@pytest.mark.parametrize(
    ("num_correct", "num_prompts", "low", "high"),
    [
        # z = 1.96. At 0 of n the upper edge is z^2 / (n + z^2); otherwise centre (p + z^2/2n) / (1 + z^2/n) and half
        # width z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n).
        (0, 10, 0.0, 0.277540),
        (10, 10, 0.722460, 1.0),
        (5, 10, 0.236588, 0.763412),
        (1, 1, 0.206543, 1.0),
        (224, 256, 0.828863, 0.910049),
    ],
)
def test_values_worked_out_by_hand(num_correct: int, num_prompts: int, low: float, high: float) -> None:
    assert wilson_interval(num_correct, num_prompts) == pytest.approx((low, high), abs=1e-5)


def test_no_prompt_says_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_it_is_the_same_from_the_other_side() -> None:
    low, high = wilson_interval(30, 100)
    assert wilson_interval(70, 100) == pytest.approx((1 - high, 1 - low))


def test_examples_in_the_text_hold() -> None:
    assert doctest.testmod(interval).failed == 0
