"""Finding the answer in a completion."""

from typing import Any

import pytest

from ebbtide.config import validate
from ebbtide.errors import ConfigError
from ebbtide.rewards.extraction import ExtractionSection, extractor


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({}, " all of it\n", " all of it\n"),
        ({"extract": "last_number"}, "First 3, then 1,234.50.", "1234.50"),
        ({"extract": "last_number"}, "It is -7.", "-7"),
        ({"extract": "last_number"}, "about 1.5e-3 m", "1.5e-3"),
        ({"extract": "last_number"}, "half: .5", ".5"),
        ({"extract": "last_number"}, "12,3456", "3456"),
        ({"extract": "last_number"}, "none", None),
        ({"extract": "last_number"}, "rooms 3-4", "4"),
        ({"extract": "last_number"}, "x=-4", "-4"),
        ({"extract": "last_number"}, "1,234,5678", "5678"),
        ({"extract": "last_number"}, "x2 = 4.", "4"),
        ({"extract": "last_line"}, "work\n\n  42  \n \n", "42"),
        ({"extract": "last_line"}, "\n \n", None),
        ({"extract": "answer_tag"}, "<answer>1</answer> no, <answer>\n2 </answer>", "\n2 "),
        ({"extract": "answer_tag"}, "<answer>1", None),
        ({"extract": "boxed"}, r"so \boxed{1} and \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ({"extract": "boxed"}, r"\boxed{1} and \boxed{2", "1"),
        ({"extract": "boxed"}, "no box", None),
        ({"extract": "boxed"}, r"\boxed{}", ""),
        ({"extract": "boxed"}, r"} \boxed{\{1, 2\}} {", r"\{1, 2\}"),
        ({"extract": "boxed"}, r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ({"extract": "boxed"}, r"\boxed{a \boxed{b} c}", "b"),
        ({"pattern": r"####\s*(\S+)"}, "a #### 1 b #### 2", "2"),
        ({"pattern": r"[A-D]"}, "B or C", "C"),
        ({"pattern": r"(x)?y"}, "y", None),
        ({"pattern": "z"}, "y", None),
    ],
)
def test_what_is_found(settings: dict[str, Any], text: str, expected: str | None) -> None:
    assert extractor(validate(ExtractionSection, settings))(text) == expected


def test_a_pattern_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pattern='\(': is not a regular expression"):
        validate(ExtractionSection, {"pattern": "("})


def test_a_pattern_and_a_way_to_extract_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"extract='boxed': has no effect beside pattern"):
        validate(ExtractionSection, {"pattern": "x", "extract": "boxed"})


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("extract", "text"),
    [
        ("boxed", r"\boxed{"),
        ("boxed", "{"),
        ("answer_tag", "<answer>"),
        ("last_number", "1,111,"),
        ("last_number", "1"),
        ("last_line", "\n"),
    ],
)
def test_a_model_that_repeats_itself_costs_no_time(extract: str, text: str) -> None:
    """A way that looks again from every opening would take minutes here."""
    extractor(validate(ExtractionSection, {"extract": extract}))(text * 200_000)
