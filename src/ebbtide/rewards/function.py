"""A user's Python function as a reward, with the signature that TRL's reward functions have."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebbtide import plugins
from ebbtide.errors import ConfigError, problem
from ebbtide.rewards.base import RewardConfig, RewardInput

__all__ = ["FunctionReward"]

_Messages = list[dict[str, Any]]


class FunctionReward:
    """Calls `function(prompts, completions, **columns)`, which returns one number a completion; it may be async.

    All arguments are keyword arguments and lists of one item a completion. For prompts that are text, `completions`
    are texts. For prompts that are chat messages, each completion is a list with one assistant message; where a prompt
    ends with the beginning of the assistant's turn, that beginning is moved from the prompt into the completion.
    Besides the row's columns there are `num_tokens` and `stop_reason`. A function without `**columns` gets what it
    names.

    Source: TRL, GRPOTrainer's custom reward functions (huggingface/trl, docs/source/grpo_trainer.md); here a score of
    None is an error, and token ids are not passed.
    """

    class Config(RewardConfig):
        """Which function."""

        type: str = "function"
        path: str
        """`my_rewards.py:score` or `my_package.my_module:score`."""

        @property
        def label(self) -> str:
            """The function's name, unless the reward has one."""
            return self.name or self.path.rpartition(":")[2]

    def __init__(self, config: Config) -> None:
        self._function: Callable[..., Any] = plugins.load_function(config.path)
        self._named = _named_parameters(self._function, config.path)

    def __call__(self, completions: Sequence[RewardInput]) -> Any:
        """What the function returns."""
        if not completions:
            return []
        turns = [_turn(completion) for completion in completions]
        arguments = _columns(completions)
        arguments["prompts"] = [prompt for prompt, _ in turns]
        arguments["completions"] = [text for _, text in turns]
        if self._named is not None:
            arguments = {name: values for name, values in arguments.items() if name in self._named}
        result = self._function(**arguments)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


def _named_parameters(function: Callable[..., Any], path: str) -> frozenset[str] | None:
    """What a function takes by name; None if it takes any name."""
    parameters = inspect.signature(function).parameters.values()
    positional = [item.name for item in parameters if item.kind is item.POSITIONAL_ONLY]
    if positional:
        rule = f"takes {', '.join(positional)} by position only, and is called with keyword arguments"
        raise ConfigError(problem("path", path, rule, "The signature is (prompts, completions, **columns)"))
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return None
    return frozenset(item.name for item in parameters)


def _turn(completion: RewardInput) -> tuple[str | _Messages, str | _Messages]:
    """Prompt and completion in the form that the function expects them."""
    prompt = completion.prompt
    if isinstance(prompt, str):
        return prompt, completion.text
    messages: _Messages = [dict(message) for message in prompt]
    begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
    return messages, [{"role": "assistant", "content": begun + completion.text}]


def _columns(completions: Sequence[RewardInput]) -> dict[str, list[Any]]:
    """The rows turned into columns; None where a row lacks one that others have."""
    rows: list[Mapping[str, Any]] = [
        {"num_tokens": item.num_tokens, "stop_reason": str(item.stop_reason), **item.row} for item in completions
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "prompts", "completions"))
    return {name: [row.get(name) for row in rows] for name in names}


async def _awaited(result: Any) -> Any:
    return await result
