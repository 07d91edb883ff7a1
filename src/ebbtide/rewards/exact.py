"""1 where the completion's answer is the row's answer, else 0."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from ebbtide.errors import DataError, problem
from ebbtide.rewards.base import RewardConfig, RewardInput
from ebbtide.rewards.extraction import ExtractionSection, extractor

__all__ = ["ExactReward"]


class ExactReward:
    """Compares texts. A row's answer may be a list, of which any member is right.

    Source: the exact-match score of SQuAD (arXiv 1606.05250); here nothing is folded that the config does not name.
    """

    class Config(RewardConfig, ExtractionSection):
        """What counts as equal. What `extract` or `pattern` finds in the row's answer stands for that answer."""

        type: str = "exact"
        strip: bool = True
        """Leave out white space at both ends."""
        ignore_case: bool = False
        """Take capital and small letters as equal."""
        numeric: bool = False
        """Compare by value where both are numbers, so that 5, 5.0 and 5e0 are equal."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._extract = extractor(config)

    def __call__(self, completions: Sequence[RewardInput]) -> list[float]:
        """1.0 or 0.0 each.

        Raises:
            DataError: a row has no answer.
        """
        return [float(self._is_right(completion)) for completion in completions]

    def _is_right(self, completion: RewardInput) -> bool:
        answer = completion.row.get("answer")
        if answer is None:
            remedy = "Name the column with data.answer_column"
            raise DataError(problem("row.answer", None, "a row without an answer cannot be compared with", remedy))
        found = self._extract(completion.text)
        if found is None:
            return False
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        return any(self._is_equal(found, self._expected(item)) for item in accepted)

    def _expected(self, answer: Any) -> str:
        text = str(answer)
        found = self._extract(text)
        return text if found is None else found

    def _is_equal(self, left: str, right: str) -> bool:
        if self._config.strip:
            left, right = left.strip(), right.strip()
        if self._config.ignore_case:
            left, right = left.casefold(), right.casefold()
        if left == right:
            return True
        if not self._config.numeric:
            return False
        try:
            return Decimal(left.replace(",", "")) == Decimal(right.replace(",", ""))
        except InvalidOperation:
            return False
