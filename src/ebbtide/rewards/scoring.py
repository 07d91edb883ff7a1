"""Running rewards over groups: under time limits, with every score checked, and failures named by reward and row.

What a failure does is the reward's `on_error`: `stop` raises `RewardError`, `skip_group` leaves out the groups that
the failure concerns. Where a call as a whole fails, each group is scored again by itself, within one more time limit
for all of them, to find those that are to blame.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from ebbtide import plugins
from ebbtide.errors import ConfigError, RewardError, problem
from ebbtide.rewards.base import Reward, RewardConfig, RewardInput
from ebbtide.rewards.worker import Died, Failed, Hung, Outcome, RewardWorker, Scores
from ebbtide.types import Group

__all__ = ["Decode", "OpenReward", "Rewards", "ScoredGroups", "score"]

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Token ids of many completions into their texts, without special tokens."""

_MAX_NAMED_ROWS = 8


@dataclass(frozen=True, slots=True)
class OpenReward:
    """A reward with its process."""

    config: RewardConfig
    worker: RewardWorker


class Rewards:
    """The rewards of a run, each in its process; close it, or use it in a `with`.

    Args:
        configs: one a reward.

    Raises:
        ConfigError: two rewards have one name, or one cannot be made from its config.
    """

    def __init__(self, configs: Sequence[Any]) -> None:
        labels = [config.label for config in configs]
        for number, label in enumerate(labels):
            if label in labels[:number]:
                rule = "two rewards have this name"
                raise ConfigError(problem(f"rewards.{number}.name", label, rule, "Give one of them another name"))
        made: list[Reward] = [plugins.load("rewards", config.type)(config) for config in configs]
        self._items = [OpenReward(config, RewardWorker(reward)) for config, reward in zip(configs, made, strict=True)]

    def __iter__(self) -> Iterator[OpenReward]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """End the processes; calling it again does nothing."""
        for item in self._items:
            item.worker.close()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ScoredGroups:
    """Groups with their rewards.

    Attributes:
        groups: those that every reward could score, in the order given, `rewards` and `reward_parts` filled.
        num_skipped: groups left out.
        errors: reward name -> groups that it could not score; rewards without failures are absent.
        messages: one line a failure, as it would have stopped the run.
        seconds: reward name -> time its scoring took.
    """

    groups: tuple[Group, ...]
    num_skipped: int
    errors: Mapping[str, int]
    messages: tuple[str, ...]
    seconds: Mapping[str, float]


def score(groups: Sequence[Group], rewards: Rewards, decode: Decode) -> ScoredGroups:
    """Score every completion by every reward.

    Args:
        groups: as generated.
        rewards: opened once a run.
        decode: token ids to text; called once.

    Raises:
        RewardError: a reward failed and its `on_error` is `stop`.
    """
    inputs = _inputs(groups, decode)
    parts: dict[str, list[list[float] | None]] = {}
    errors: dict[str, int] = {}
    messages: list[str] = []
    seconds: dict[str, float] = {}
    for item in rewards:
        start = time.perf_counter()
        found = _Scoring(item, groups, inputs)
        parts[item.config.label] = found.run()
        seconds[item.config.label] = time.perf_counter() - start
        messages += found.messages
        if None in parts[item.config.label]:
            errors[item.config.label] = parts[item.config.label].count(None)
    weights = {item.config.label: item.config.weight for item in rewards}
    kept = [_filled(group, {name: part[g] for name, part in parts.items()}, weights) for g, group in enumerate(groups)]
    done = tuple(group for group in kept if group is not None)
    return ScoredGroups(done, len(groups) - len(done), errors, tuple(messages), seconds)


def _inputs(groups: Sequence[Group], decode: Decode) -> list[list[RewardInput]]:
    texts = iter(decode([completion.token_ids.tolist() for group in groups for completion in group.completions]))
    return [
        [
            RewardInput(
                prompt=group.prompt.row.get("prompt"),
                text=next(texts),
                row=group.prompt.row,
                num_tokens=completion.token_ids.shape[0],
                stop_reason=completion.stop_reason,
            )
            for completion in group.completions
        ]
        for group in groups
    ]


def _filled(group: Group, parts: Mapping[str, list[float] | None], weights: Mapping[str, float]) -> Group | None:
    tensors = {name: torch.tensor(part, dtype=torch.float32) for name, part in parts.items() if part is not None}
    if len(tensors) < len(parts):
        return None
    total = torch.zeros(len(group.completions))
    for name, part in tensors.items():
        total += weights[name] * part
    return replace(group, rewards=total, reward_parts=tensors)


class _Scoring:
    """One reward over one step's groups."""

    def __init__(self, item: OpenReward, groups: Sequence[Group], inputs: Sequence[Sequence[RewardInput]]) -> None:
        self._config, self._worker = item.config, item.worker
        self._groups = groups
        self._inputs = inputs
        self._num_completions = sum(map(len, inputs))
        self._started = 0.0
        self._whole: Outcome | None = None
        self.messages: list[str] = []

    def run(self) -> list[list[float] | None]:
        """Scores of each group; None for those that the reward failed on."""
        flat = [completion for group in self._inputs for completion in group]
        if not flat:
            return [[] for _ in self._groups]
        outcome = self._worker.call(flat, self._config.time_limit_s)
        values = _values(outcome, len(flat))
        if values is None:
            return self._group_by_group(outcome)
        scores: list[list[float] | None] = []
        at = 0
        for g, group in enumerate(self._inputs):
            scores.append(self._checked(g, values[at : at + len(group)]))
            at += len(group)
        return scores

    def _group_by_group(self, whole: Outcome) -> list[list[float] | None]:
        """After the call over all groups failed: find which of them it was."""
        self._started, self._whole = time.monotonic(), whole
        scores: list[list[float] | None] = []
        for g, group in enumerate(self._inputs):
            outcome = self._again(group)
            values = _values(outcome, len(group))
            if values is None:
                self._blame(g, outcome)
            scores.append(None if values is None else self._checked(g, values))
        if not self.messages:
            said = f"{_said(whole)}; no row by itself makes it do so"
            self._fail(range(len(self._groups)), None, said, _trace(whole))
        return scores

    def _again(self, completions: Sequence[RewardInput]) -> Outcome:
        """Call once more, for a part. After a hang each completion gets its share of the time, else what is left."""
        share = self._config.time_limit_s * len(completions) / self._num_completions
        left = self._started + self._config.time_limit_s - time.monotonic()
        return self._worker.call(completions, share if isinstance(self._whole, Hung) else max(share, left))

    def _blame(self, g: int, outcome: Outcome) -> None:
        """Report a group that fails by itself; names the completion if one fails by itself too."""
        group = self._inputs[g]
        c = 0 if len(group) == 1 else None
        for number, completion in enumerate(group if c is None else ()):
            single = self._again([completion])
            if _values(single, 1) is None:
                c, outcome = number, single
                break
        said = _said(outcome)
        if isinstance(outcome, Hung) and isinstance(self._whole, Hung):
            said = f"did not return within {self._whole.seconds:.3g} s for all {self._num_completions} completions, "
            said += f"nor within {outcome.seconds:.3g} s for this alone; raise time_limit_s if it is only slow"
        self._fail([g], c, said, _trace(outcome))

    def _checked(self, g: int, values: Sequence[float | str]) -> list[float] | None:
        scores: list[float] = []
        for c, value in enumerate(values):
            if isinstance(value, str) or not math.isfinite(value):
                self._fail([g], c, f"returned {value}, and a score is one finite number", "")
                return None
            scores.append(value)
        return scores

    def _fail(self, groups: Sequence[int], c: int | None, said: str, trace: str) -> None:
        """Stop the run, or note the message, about all completions of some groups or one of a single group."""
        rows = [str(self._groups[g].prompt.index) for g in groups]
        more = f" and {len(rows) - _MAX_NAMED_ROWS} more" if len(rows) > _MAX_NAMED_ROWS else ""
        where = (
            f"reward {self._config.label}, row{'s' if len(rows) > 1 else ''} {', '.join(rows[:_MAX_NAMED_ROWS])}{more}"
        )
        inputs = self._inputs[groups[0]]
        if c is None:
            text = problem(where, [_short(item.text) for item in inputs[:2]], said, _REMEDY)
        else:
            text = problem(f"{where}, completion {c}", _short(inputs[c].text), said, _REMEDY)
        message = f"{text}\n{trace}" if trace else text
        if self._config.on_error == "stop":
            raise RewardError(message)
        self.messages.append(message)


_REMEDY = "Mend the reward, or set on_error='skip_group' to leave such groups out"


def _values(outcome: Outcome, count: int) -> list[float | str] | None:
    """What can be looked at score by score; None if the call as a whole failed."""
    if isinstance(outcome, Scores) and outcome.is_sequence and len(outcome.values) == count:
        return outcome.values
    return None


def _said(outcome: Outcome) -> str:
    match outcome:
        case Failed(error, _):
            return f"raised {error}"
        case Hung(seconds):
            return f"did not return within {seconds:.3g} s and was killed; raise time_limit_s if it is only slow"
        case Died(how):
            return f"ended its process ({how})"
        case Scores(values, is_sequence, count):
            shown = f"{len(values)} scores" if is_sequence else f"{values[0]}"
            return f"returned {shown} for {count} completion{'s' if count > 1 else ''}"


def _trace(outcome: Outcome) -> str:
    return outcome.trace.rstrip() if isinstance(outcome, Failed) else ""


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."
