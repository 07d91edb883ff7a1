"""Rows into prompts: templates, special tokens, lengths, and what is refused."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ebbtide.data.prompts import Prompts
from ebbtide.data.sampler import Sampler
from ebbtide.data.sources.base import Row
from ebbtide.errors import DataError, ModelError


class _Rows:
    """A source of given prompts; the held-out ones are capital letters, as long as their place in the alphabet."""

    def __init__(self, *prompts: Any) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Row:
        return {"prompt": self.prompts[index], "answer": str(index)}

    def held_out(self, num_rows: int) -> list[Row]:
        if num_rows > 26:
            raise DataError("there are 26 held-out rows")
        return [{"prompt": chr(65 + number) * (number + 1)} for number in range(num_rows)]


class _Characters:
    """One token a character; 1 in front, as a tokenizer that adds a beginning of sequence does."""

    chat_template: Any = "a template"
    calls = 0

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        self.calls += 1
        front = [1] if add_special_tokens else []
        return {"input_ids": [front + [ord(character) for character in item if character != "~"] for item in text]}

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, continue_final_message: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt != continue_final_message
        text = "".join(f"<{message['role'][0]}>{message['content']}" for message in conversation)
        return text + ("<a>" if add_generation_prompt else "")


def _prompts(*prompts: Any, chat: bool = False, max_tokens: int = 100, drop: bool = False) -> Prompts:
    return Prompts(
        _Rows(*prompts),
        _Characters(),
        chat_template=chat,
        max_tokens=max_tokens,
        long_prompts="drop" if drop else "error",
    )


def _text(token_ids: torch.Tensor) -> str:
    return "".join(chr(token) for token in token_ids.tolist() if token != 1)


def test_plain_text_gets_the_tokenizers_own_special_tokens() -> None:
    (prompt,) = _prompts("ab").take([0])
    assert prompt.token_ids.tolist() == [1, 97, 98]
    assert prompt.token_ids.dtype == torch.int64
    assert prompt.index == 0
    assert prompt.row == {"prompt": "ab", "answer": "0"}


def test_text_becomes_a_user_message_under_a_chat_template() -> None:
    (prompt,) = _prompts("ab", chat=True).take([0])
    assert _text(prompt.token_ids) == "<u>ab<a>"
    assert 1 not in prompt.token_ids.tolist(), "the template writes the special tokens, and they must not come twice"
    assert prompt.row["prompt"] == "ab", "rewards see the prompt as the row has it"


def test_messages_keep_their_roles() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    (prompt,) = _prompts(messages, chat=True).take([0])
    assert _text(prompt.token_ids) == "<s>s<u>q<a>"


def test_a_begun_answer_is_continued() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure"}]
    (prompt,) = _prompts(messages, chat=True).take([0])
    assert _text(prompt.token_ids) == "<u>q<a>Sure"


def test_a_real_tokenizer_and_its_template() -> None:
    from transformers import PreTrainedTokenizerFast

    from ebbtide.models.tokenizer import character_tokenizer

    tokenizer = character_tokenizer("abc<>u", 64)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    prompts = Prompts(_Rows("abc", "cab"), tokenizer, chat_template=True, max_tokens=5)
    assert [tokenizer.decode(prompt.token_ids) for prompt in prompts.take([0, 1])] == ["<abc>", "<cab>"]
    plain = Prompts(_Rows("abc"), tokenizer, chat_template=False, max_tokens=5)
    assert tokenizer.decode(plain.take([0])[0].token_ids) == "abc"


def test_a_batch_is_tokenised_in_one_call() -> None:
    tokenizer = _Characters()
    prompts = Prompts(_Rows(*"abcdefgh"), tokenizer, chat_template=False, max_tokens=9)
    prompts.next(Sampler(8, 8, seed=0))
    assert tokenizer.calls == 1


def test_a_long_prompt_names_row_length_limit_and_remedy() -> None:
    prompts = _prompts("a", "abcdef", max_tokens=4)
    with pytest.raises(DataError) as caught:
        prompts.take([0, 1])
    text = str(caught.value)
    assert "batch.max_prompt_tokens=4" in text
    assert "row 1 has a prompt of 7 tokens" in text
    assert "batch.long_prompts='drop'" in text


def test_dropped_prompts_are_replaced_and_counted() -> None:
    prompts = _prompts("a", "long enough", "b", "as long as that", "c", max_tokens=2, drop=True)
    sampler = Sampler(5, 3, seed=0)
    batches = [prompts.next(sampler) for _ in range(5)]
    assert [len(batch) for batch in batches] == [3] * 5
    assert {_text(prompt.token_ids) for batch in batches for prompt in batch} == {"a", "b", "c"}
    assert prompts.num_dropped > 0
    assert sampler.state()["position"] == 15 + prompts.num_dropped


def test_dropping_is_the_same_after_a_resume() -> None:
    rows = ["a" * (number % 5 + 1) for number in range(40)]
    prompts = _prompts(*rows, max_tokens=4, drop=True)
    sampler = Sampler(40, 8, seed=1)
    prompts.next(sampler)
    saved = sampler.state()
    expected = [prompt.index for prompt in prompts.next(sampler)]
    resumed = Sampler(40, 8, seed=1)
    resumed.load_state(saved)
    assert [prompt.index for prompt in _prompts(*rows, max_tokens=4, drop=True).next(resumed)] == expected


def test_a_batch_of_nothing_but_long_prompts_ends() -> None:
    with pytest.raises(DataError, match="all 3 prompts are longer"):
        _prompts("abc", "abcd", "abcde", max_tokens=2, drop=True).next(Sampler(3, 2, seed=0))


def test_held_out_prompts_count_down_from_minus_one() -> None:
    prompts = _prompts("x").held_out(3)
    assert [prompt.index for prompt in prompts] == [-1, -2, -3]
    assert [_text(prompt.token_ids) for prompt in prompts] == ["A", "BB", "CCC"]


def test_held_out_prompts_that_are_dropped_are_replaced() -> None:
    class _Shrinking(_Rows):
        def held_out(self, num_rows: int) -> list[Row]:
            return [{"prompt": "Z" * (9 if number % 2 else 1)} for number in range(num_rows)]

    prompts = Prompts(_Shrinking("x"), _Characters(), chat_template=False, max_tokens=4, long_prompts="drop")
    assert [prompt.index for prompt in prompts.held_out(4)] == [-1, -3, -5, -7]
    assert prompts.num_dropped > 0


def test_held_out_prompts_that_run_out_are_an_error() -> None:
    with pytest.raises(DataError, match="26 held-out rows"):
        _prompts("x", max_tokens=3, drop=True).held_out(3)


def test_a_long_held_out_prompt_is_named_as_such() -> None:
    with pytest.raises(DataError, match="row 3 of the held-out rows"):
        _prompts("x", max_tokens=4).held_out(4)


def test_a_prompt_without_tokens_is_an_error() -> None:
    with pytest.raises(DataError, match=r"prompt='~': row 1 has no tokens"):
        Prompts(_Rows("a", "~"), _NoSpecial(), chat_template=False, max_tokens=9, long_prompts="drop").take([0, 1])


class _NoSpecial(_Characters):
    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        return super().__call__(text, add_special_tokens=False)


def test_no_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="no rows to train on"):
        _prompts()


def test_messages_without_a_template_are_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"row 0 has chat messages.*Set model.chat_template=true"):
        _prompts([{"role": "user", "content": "q"}]).take([0])


def test_a_tokenizer_without_a_template_is_refused_at_the_start() -> None:
    tokenizer = _Characters()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        Prompts(_Rows("a"), tokenizer, chat_template=True, max_tokens=9)


def test_no_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="leaves no room"):
        _prompts("a", max_tokens=0)
