"""Rows from a task of reasoning-gym: generated on demand, never stored, as many as wanted."""

import random
from collections.abc import Callable
from typing import Any

from pydantic import Field, model_validator

from ebbtide import plugins
from ebbtide.data.sources.base import Row, SourceConfig, check_prompt, content_key, is_held_out
from ebbtide.errors import ConfigError, DataError, did_you_mean, problem

__all__ = ["ReasoningGymSource"]

_MAX_REDRAWS = 64
_MAX_SEED = 2**31
_OWN_PARAMS = ("seed", "size")
# Generators derive an item from seed + index, so nearby seeds share nearly all of their items; seeds are spread far.
_HELD_OUT_SEED = random.Random("held out").randrange(_MAX_SEED)


class ReasoningGymSource:
    """Items of one task, with prompts of the user's making.

    A row has the item's own `question`, `answer` and `metadata`, `prompt`, and `reasoning_gym` with the task and its
    parameters, by which the reward of the same name finds the task's scorer.

    Source: reasoning-gym (arXiv 2505.24760); here training and held-out items never share a prompt.
    """

    class Config(SourceConfig):
        """Which task, and how its items become prompts."""

        type: str = "reasoning_gym"
        task: str
        """Name of the task in reasoning-gym."""
        params: dict[str, Any] = Field(default_factory=dict)
        """The task's own parameters, passed to `reasoning_gym.create_dataset`."""
        size: int = Field(100_000, ge=1)
        """Training rows of one epoch."""
        prompt: str | None = None
        """`file.py:function` that makes a prompt, text or chat messages, from an item; None takes its question."""
        template: str | None = None
        """Text with {question} or {metadata[key]} in it, as `str.format` reads it, instead of `prompt`."""
        demonstration: str | None = None
        """`file.py:function` that makes a completion from (item, random.Random) for a supervised start; None takes
        the item's answer."""
        eval_fraction: float = Field(0.2, gt=0, lt=1)
        """Share of all prompts that is kept for evaluation, chosen by content."""

        @model_validator(mode="after")
        def _no_contradiction(self) -> "ReasoningGymSource.Config":
            problems = [
                problem(
                    f"params.{key}", self.params[key], "is set by the source", "Use seed and data.size of the recipe"
                )
                for key in _OWN_PARAMS
                if key in self.params
            ]
            if self.prompt is not None and self.template is not None:
                problems.append(problem("template", self.template, "contradicts prompt, which is set as well"))
            if problems:
                raise ConfigError(problems)
            return self

    def __init__(self, config: Config, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._origin = {"task": config.task, "params": dict(config.params)}
        self._prompt = _prompt_function(config)
        self._demonstrate: Callable[..., str] | None = None
        if config.demonstration is not None:
            self._demonstrate = plugins.load_function(config.demonstration)
        spread = random.Random(f"train {seed}")
        self._seeds = [spread.randrange(_MAX_SEED) for _ in range(_MAX_REDRAWS)]
        self._datasets = [_create(config, self._seeds[0])]
        self._held_out: list[Row] = []
        self._held_out_keys: set[int] = set()
        self._num_scanned = 0
        self._held_out_items = _create(config, _HELD_OUT_SEED)

    def __len__(self) -> int:
        return self._config.size

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._config.size:
            raise IndexError(f"row {index} of {self._config.size}")
        for redraw in range(_MAX_REDRAWS):
            if redraw == len(self._datasets):
                self._datasets.append(_create(self._config, self._seeds[redraw]))
            row, key = self._row(self._datasets[redraw], index)
            if not is_held_out(key, self._config.eval_fraction):
                return row
        rule = f"row {index}: {_MAX_REDRAWS} items in a row were prompts that are held out"
        raise DataError(problem("data.task", self._config.task, rule, _FEW_PROMPTS))

    def held_out(self, num_rows: int) -> list[Row]:
        """See the contract; all prompts differ."""
        while len(self._held_out) < num_rows:
            if self._num_scanned >= _scan_limit(self._config, num_rows):
                rule = f"has only {len(self._held_out)} different held-out prompts and {num_rows} are wanted"
                raise DataError(problem("data.task", self._config.task, rule, _FEW_PROMPTS))
            row, key = self._row(self._held_out_items, self._num_scanned % self._config.size)
            self._num_scanned += 1
            if self._num_scanned % self._config.size == 0:
                self._held_out_items = _create(self._config, _HELD_OUT_SEED + self._num_scanned)
            if is_held_out(key, self._config.eval_fraction) and key not in self._held_out_keys:
                self._held_out_keys.add(key)
                self._held_out.append(row)
        return self._held_out[:num_rows]

    def demonstration(self, index: int) -> str:
        """A completion for row `index`, drawn with a generator of its own."""
        row = self[index]
        if self._demonstrate is None:
            if row["answer"] is None:
                rule = "items have no answer of their own to show"
                raise DataError(problem("data.task", self._config.task, rule, "Set data.demonstration"))
            return str(row["answer"])
        text = self._demonstrate(row, random.Random(f"demonstration {self._seed} {index}"))
        if not isinstance(text, str) or not text:
            rule = f"row {index}: a demonstration must be text that is not empty"
            raise DataError(problem(f"data.demonstration {self._config.demonstration}", text, rule))
        return text

    def _row(self, items: Any, index: int) -> tuple[dict[str, Any], int]:
        item = dict(items[index])
        prompt = self._prompt(item)
        check_prompt(prompt, lambda: f"data.prompt of item {index}")
        return {**item, "prompt": prompt, "reasoning_gym": self._origin}, content_key(prompt)


_FEW_PROMPTS = "Give the task more different prompts through data.params, or change data.eval_fraction"


def _scan_limit(config: ReasoningGymSource.Config, num_rows: int) -> int:
    """Items to look at before concluding that a task has too few prompts; twenty times the number expected."""
    return int(20 * (num_rows + 20) / config.eval_fraction)


def _prompt_function(config: ReasoningGymSource.Config) -> Callable[[dict[str, Any]], Any]:
    if config.prompt is not None:
        return plugins.load_function(config.prompt)
    template = config.template
    if template is None:
        return lambda item: item["question"]

    def fill(item: dict[str, Any]) -> str:
        try:
            return template.format(**item)
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            rule = f"cannot be filled from an item: {error!r}"
            remedy = f"An item has {', '.join(item)}; metadata has {', '.join(item.get('metadata', {}))}"
            raise ConfigError(problem("data.template", template, rule, remedy)) from error

    return fill


def _create(config: ReasoningGymSource.Config, seed: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset  # a second of imports, only where used

    if config.task not in DATASETS:
        rule = f"reasoning-gym has no such task among its {len(DATASETS)}"
        raise ConfigError(problem("data.task", config.task, rule, did_you_mean(config.task, list(DATASETS))))
    try:
        return create_dataset(config.task, seed=seed, size=config.size, **config.params)
    except (TypeError, ValueError, AssertionError) as error:
        rule = f"the task {config.task} refuses them: {error}"
        remedy = f"Change them, or data.size, which is {config.size}"
        raise ConfigError(problem("data.params", config.params, rule, remedy)) from error
