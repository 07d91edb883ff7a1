import re

import pytest

from ebbtide.errors import DataError
from ebbtide.observe.metrics import METRICS, Metric, check, describe

SUFFIXES = {"s": "_s", "bytes": "_bytes", "tokens": "_tokens", "nats": "_nats", "tokens/s": "_tokens_per_s"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.pattern)
def test_every_row_is_an_area_a_name_and_the_unit_that_ends_it(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z]+/(\*|[a-z_]*\*?[a-z_]*[a-z])", metric.pattern)
    assert metric.pattern.count("*") <= 1
    if metric.pattern != "throughput/tokens_per_s":
        assert metric.pattern.endswith(SUFFIXES.get(metric.unit, ""))
    assert metric.sentence.endswith(".")
    assert len(metric.sentence) > 15


def test_patterns_are_unique_and_none_hides_a_later_one() -> None:
    patterns = [metric.pattern for metric in METRICS]
    assert len(set(patterns)) == len(patterns)
    for metric in METRICS:
        assert describe(metric.pattern.replace("*", "some_name")) is metric


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("reward/exact_mean", ""),
        ("reward/accuracy", "ratio"),
        ("time/update.forward_s", "s"),
        ("memory/generate_peak_rss_bytes", "bytes"),
        ("throughput/generated_tokens_per_s", "tokens/s"),
        ("policy/entropy_nats", "nats"),
        ("own/anything at all", ""),
    ],
)
def test_a_key_has_its_unit(key: str, unit: str) -> None:
    assert describe(key).unit == unit


@pytest.mark.parametrize("key", ["reward", "rewards/mean", "time/generate", "loss", "", "Reward/mean"])
def test_an_unknown_key_is_refused(key: str) -> None:
    with pytest.raises(DataError, match="no metric has this key"):
        describe(key)


def test_the_nearest_key_is_named_and_all_unknown_ones_are_reported() -> None:
    with pytest.raises(DataError) as caught:
        check(["reward/mean", "optim/grad_nrom", "nonsense"])
    first, second = str(caught.value).splitlines()
    assert first == "metric='optim/grad_nrom': no metric has this key. Did you mean 'optim/grad_norm'?"
    assert second.startswith("metric='nonsense': no metric has this key. A plugin of yours")
