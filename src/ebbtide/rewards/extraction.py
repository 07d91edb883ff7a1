"""Which part of a completion is the answer: shared by the rewards that compare answers."""

import re
from collections.abc import Callable
from typing import Literal

from pydantic import field_validator, model_validator

from ebbtide.config import Section
from ebbtide.errors import ConfigError, problem

__all__ = ["Extract", "ExtractionSection", "extractor"]

Extract = Literal["all", "last_number", "last_line", "answer_tag", "boxed"]

# 1,234.5 and -3 and 1e-6, but not the full stop that ends a sentence.
_SIGN = r"(?:(?<![\w)])-)?"  # the minus of 3-4 is no sign
_NUMBER = re.compile(rf"{_SIGN}(?:(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?")
_BRACE = re.compile(r"\\boxed\{|(?<!\\)[{}]")


class ExtractionSection(Section):
    """How the answer is found in a completion."""

    extract: Extract = "all"
    """`all` takes the whole text; `last_number` the last number, without thousands separators; `last_line` the last
    line that is not empty; `answer_tag` what stands in the last <answer></answer>; `boxed` in the last \\boxed{}."""
    pattern: str | None = None
    """Regular expression instead of `extract`: the last match's first group, or the match where it has no group."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ConfigError(problem("pattern", pattern, f"is not a regular expression: {error}")) from error
        return pattern

    @model_validator(mode="after")
    def _no_contradiction(self) -> "ExtractionSection":
        if self.pattern is not None and self.extract != "all":
            raise ConfigError(problem("extract", self.extract, "has no effect beside pattern", "Remove one of them"))
        return self


def extractor(section: ExtractionSection) -> Callable[[str], str | None]:
    """A function from a completion to its answer; None where there is none.

    Example:
        >>> find = extractor(ExtractionSection(extract="last_number"))
        >>> find("7 apples and 1,005 pears."), find("none")
        ('1005', None)
    """
    if section.pattern is not None:
        return _by_pattern(re.compile(section.pattern))
    return {
        "all": lambda text: text,
        "last_number": _last_number,
        "last_line": _last_line,
        "answer_tag": _answer_tag,
        "boxed": _boxed,
    }[section.extract]


def _by_pattern(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    def find(text: str) -> str | None:
        last = None
        for last in pattern.finditer(text):  # noqa: B007 the last match is what is wanted
            pass
        return None if last is None else last.group(1 if pattern.groups else 0)

    return find


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _answer_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    """What stands in the complete box that begins last; braces inside it are matched. One pass, whatever is written."""
    opened: list[int | None] = []  # where the content of a box begins; None for a brace that opens no box
    found: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace.group().endswith("{"):
            opened.append(brace.end() if len(brace.group()) > 1 else None)
        elif opened:
            start = opened.pop()
            if start is not None and (found is None or start > found[0]):
                found = (start, brace.start())
    return None if found is None else text[found[0] : found[1]]
