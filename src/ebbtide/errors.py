"""Every error that ebbtide raises on purpose.

A message says `<where>=<value>: <rule>. <remedy>`. Each class is also the standard-library type that it refines, so
that callers may catch either. All of them pickle, because they cross process boundaries.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConsistencyError",
    "DataError",
    "DeadlineError",
    "EbbtideError",
    "EngineError",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "RewardError",
    "RolloutError",
    "RunFolderError",
    "WeightSyncError",
    "did_you_mean",
    "problem",
]


class EbbtideError(Exception):
    """The root of the tree; catch it to catch everything that ebbtide raises on purpose."""


class ConfigError(EbbtideError, ValueError):
    """The configuration cannot be run; the message lists every problem found, one a line."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class DataError(EbbtideError, ValueError):
    """A dataset, a row or a batch breaks a rule."""


class ModelError(EbbtideError, ValueError):
    """A model or tokenizer that ebbtide refuses, with the reason."""


class RewardError(EbbtideError, RuntimeError):
    """A reward raised, hung, or returned something that is not one finite score per completion."""


class EngineError(EbbtideError, RuntimeError):
    """A training engine was driven against its contract, or found its own state broken."""


class NonFiniteError(EngineError, ArithmeticError):
    """Loss or gradient was not finite for more steps in a row than the run allows."""


class RolloutError(EbbtideError, RuntimeError):
    """A rollout backend was driven against its contract, or died."""


class WeightSyncError(EbbtideError, RuntimeError):
    """A push of weights did not complete on some rank; the message carries the rank and the remote text."""


class ConsistencyError(EbbtideError, RuntimeError):
    """Rollout and engine disagree about the log-probs of the same tokens under the same weights."""


class CheckpointError(EbbtideError, RuntimeError):
    """A checkpoint is incomplete, damaged, or does not fit this run."""


class DeadlineError(EbbtideError, TimeoutError):
    """A bounded wait reached its bound."""


class MissingExtraError(EbbtideError, ImportError):
    """An optional package is needed; the message has the line that installs it."""


class RunFolderError(EbbtideError, OSError):
    """The run's folder cannot be used as asked."""


_SHOWN_CHARACTERS = 240  # of a value, so that the rule stays in sight


def problem(where: str, value: object, rule: str, remedy: str = "") -> str:
    """One error text in the house form.

    Example:
        >>> problem("optim.lr", -1.0, "must be above 0", "Typical values are 1e-6 to 1e-4")
        'optim.lr=-1.0: must be above 0. Typical values are 1e-6 to 1e-4.'
    """
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[: _SHOWN_CHARACTERS // 2]} ... {shown[-_SHOWN_CHARACTERS // 2 :]}"
    sentences = [rule.rstrip(".")] + ([remedy.rstrip(".")] if remedy else [])
    end = "" if sentences[-1].endswith("?") else "."
    return f"{where}={shown}: " + ". ".join(sentences) + end


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The part of a remedy that names the nearest known word; empty if none is near.

    Example:
        >>> did_you_mean("vlm", ["inprocess", "vllm"])
        "Did you mean 'vllm'?"
    """
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else ""
