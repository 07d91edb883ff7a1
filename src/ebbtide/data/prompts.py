"""Rows into prompts: chat template or plain text, tokenised a batch at a time when drawn, length checked."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from ebbtide.data.sampler import Sampler
from ebbtide.data.sources.base import Row, Source
from ebbtide.errors import DataError, ModelError, problem
from ebbtide.types import Prompt

__all__ = ["Prompts", "Tokenizer"]


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """`input_ids` of each text."""
        ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, continue_final_message: bool
    ) -> Any:
        """The conversation as text."""
        ...


class Prompts:
    """The prompts of a source.

    Args:
        source: where the rows are.
        tokenizer: a transformers tokenizer, or anything with the same face.
        chat_template: wrap prompts in the tokenizer's chat template; text becomes one user message.
        max_tokens: longest prompt, in tokens with the template applied.
        long_prompts: what to do with a longer one.

    Raises:
        DataError: the source has no rows.
        ModelError: a chat template is asked for and the tokenizer has none.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        chat_template: bool,
        max_tokens: int,
        long_prompts: Literal["error", "drop"] = "error",
    ) -> None:
        if len(source) == 0:
            raise DataError(problem("data", 0, "the dataset has no rows to train on"))
        if chat_template and tokenizer.chat_template is None:
            rule = "the tokenizer has no chat template"
            raise ModelError(
                problem("model.chat_template", True, rule, "Set model.chat_template=false to feed plain text")
            )
        if max_tokens < 1:
            raise DataError(problem("batch.max_prompt_tokens", max_tokens, "leaves no room for a prompt"))
        self.source = source
        self.max_tokens = max_tokens
        self.num_dropped = 0
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._long_prompts = long_prompts

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: Sequence[int]) -> list[Prompt]:
        """The rows `indices` as prompts, in order, without those dropped for their length.

        Raises:
            DataError: a prompt without tokens, or one too long where that is an error.
        """
        return self._tokenised(list(indices), [self.source[index] for index in indices])

    def next(self, sampler: Sampler, count: int | None = None) -> list[Prompt]:
        """`count` prompts, or a whole batch; rows dropped for their length are replaced by the next ones drawn.

        Raises:
            DataError: as in `take`; also if every row is too long.
        """
        prompts: list[Prompt] = []
        num_drawn = 0
        wanted = sampler.batch if count is None else count
        while len(prompts) < wanted:
            if not prompts and num_drawn >= 2 * sampler.num_rows:
                rule = f"all {sampler.num_rows} prompts are longer"
                raise DataError(problem("batch.max_prompt_tokens", self.max_tokens, rule, "Raise it, or shorten them"))
            indices = sampler.draw(wanted - len(prompts))
            num_drawn += len(indices)
            prompts += self.take(indices)
        return prompts

    def held_out(self, num_prompts: int) -> list[Prompt]:
        """Prompts to evaluate on; their indices count down from -1.

        Raises:
            DataError: as in `take`; also if there are fewer.
        """
        prompts: list[Prompt] = []
        num_rows = num_seen = 0
        while len(prompts) < num_prompts:
            num_rows += num_prompts - len(prompts)
            rows = self.source.held_out(num_rows)[num_seen:]
            prompts += self._tokenised([-1 - number for number in range(num_seen, num_rows)], rows)
            num_seen = num_rows
        return prompts

    def _tokenised(self, indices: Sequence[int], rows: Sequence[Row]) -> list[Prompt]:
        if not rows:
            return []
        texts = [self._text(index, row["prompt"]) for index, row in zip(indices, rows, strict=True)]
        # A chat template writes its own special tokens; plain text gets what the tokenizer puts in front by itself.
        token_ids = self._tokenizer(texts, add_special_tokens=not self._chat_template)["input_ids"]
        return [
            Prompt(index=index, token_ids=torch.tensor(ids, dtype=torch.int64), row=row)
            for index, row, ids in zip(indices, rows, token_ids, strict=True)
            if self._fits(index, row, ids)
        ]

    def _text(self, index: int, prompt: Any) -> str:
        if not self._chat_template:
            if isinstance(prompt, str):
                return prompt
            rule = f"row {_named(index)} has chat messages, and plain text is wanted"
            raise DataError(problem("model.chat_template", False, rule, "Set model.chat_template=true"))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        is_begun = messages[-1]["role"] == "assistant"  # the completion goes on from there
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not is_begun, continue_final_message=is_begun
        )
        assert isinstance(text, str), type(text)
        return text

    def _fits(self, index: int, row: Row, ids: Sequence[int]) -> bool:
        if not len(ids):
            rule = f"row {_named(index)} has no tokens; a completion needs at least one to start from"
            raise DataError(problem("prompt", row["prompt"], rule, "Mend the row, or the tokenizer"))
        if len(ids) <= self.max_tokens:
            return True
        if self._long_prompts == "drop":
            self.num_dropped += 1
            return False
        rule = f"row {_named(index)} has a prompt of {len(ids)} tokens"
        remedy = "Raise batch.max_prompt_tokens, lower sampling.max_tokens, or set batch.long_prompts='drop'"
        raise DataError(problem("batch.max_prompt_tokens", self.max_tokens, rule, remedy))


def _named(index: int) -> str:
    return str(index) if index >= 0 else f"{-1 - index} of the held-out rows"
