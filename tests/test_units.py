import doctest

import pytest

from ebbtide import units
from ebbtide.units import GIB, MIB, format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024 * 1023.99, "1.0 MiB"),
        (MIB - 1, "1.0 MiB"),
        (GIB - 1, "1.0 GiB"),
        (-1536, "-1.5 KiB"),
        (5000 * GIB, "4.9 TiB"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0001, "0.1 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1.0 s"),
        (59.96, "1:00"),
        (3.21, "3.2 s"),
        (125, "2:05"),
        (119.7, "2:00"),
        (3599.9, "1:00:00"),
        (7322, "2:02:02"),
        (-3.21, "-3.2 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.0k"),
        (151_936, "151.9k"),
        (999_960, "1.0M"),
        (7.6e9, "7.6G"),
        (-2000, "-2.0k"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


def test_examples_in_the_text_hold() -> None:
    assert doctest.testmod(units).failed == 0
