import math

import pytest

from ebbtide.observe.charts import Chart
from ebbtide.observe.curves import curves
from ebbtide.observe.record import Run


def find(title: str, *rows: dict[str, float]) -> Chart:
    (chart,) = (chart for chart in curves(Run("", {}, rows, [])) if chart.title == title)
    return chart


def test_a_short_run_is_drawn_as_it_is() -> None:
    (series,) = find("Reward", *({"step": step, "reward/mean": float(step)} for step in range(39))).series
    assert (series.name, series.style) == ("reward", "line")
    assert series.values == [float(step) for step in range(39)]


def test_a_longer_run_has_means_over_a_twentieth_of_it() -> None:
    rows = [{"step": step, "reward/mean": float(step % 2)} for step in range(60)]
    rows[10]["reward/mean"] = math.nan
    faint, mean = find("Reward", *rows).series
    assert (faint.style, mean.style) == ("faint", "line")
    assert mean.values[:2] == [0.5, pytest.approx(1 / 3)]  # of 0 1, and of 0 1 0
    assert math.isnan(mean.values[10])
    assert mean.values[11] == 0.5  # of 1 0, the third being no number


def test_several_rewards_are_drawn_beside_their_sum_and_a_single_one_is_not() -> None:
    one = {"step": 1, "reward/mean": 1.0, "reward/exact_mean": 1.0}
    assert [series.name for series in find("Reward", one).series] == ["reward"]
    two = one | {"reward/length_mean": 0.5}
    assert [series.name for series in find("Reward", two).series] == ["sum", "exact", "length"]


def test_held_out_accuracy_has_its_interval() -> None:
    chart = find("Accuracy", {"step": 0, "eval/accuracy": 0.5, "eval/num_prompts": 10.0, "eval/greedy_accuracy": 0.75})
    held_out = chart.series[-2]
    assert (held_out.values, held_out.style) == ([0.5], "points")
    assert (held_out.low[0], held_out.high[0]) == pytest.approx((0.236588, 0.763412), abs=1e-5)
    assert chart.series[-1].values == [0.75]


def test_on_a_device_its_memory_is_what_counts() -> None:
    host = {"step": 1, "time/step_s": 1.0, "time/update_s": 1.0, "memory/update_peak_rss_bytes": 1.0}
    assert find("Memory by phase", host).series[0].values == [1.0]
    device = host | {"memory/update_peak_allocated_bytes": 2.0}
    assert find("Memory by phase", device).series[0].values == [2.0]
    assert "allocated on the device" in find("Memory by phase", device).sentence


def test_a_bound_that_some_steps_have_not_is_left_out() -> None:
    rows = [{"step": 1, "policy/ratio_mean": 1.0, "policy/ratio_min": 0.5, "policy/ratio_max": 2.0}]
    assert list(find("Ratio", *rows).series[0].low) == [0.5]
    assert list(find("Ratio", *rows, {"step": 2, "policy/ratio_mean": 1.0}).series[0].low) == []
