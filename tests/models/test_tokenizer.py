from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ebbtide.errors import ConfigError
from ebbtide.models.tokenizer import EOS, PAD, SPECIAL, character_tokenizer


def test_each_character_is_a_token_after_the_special_ones() -> None:
    tokenizer = character_tokenizer("ab 1", context_tokens=64)
    assert len(tokenizer) == 7
    assert SPECIAL == (PAD, EOS, "<unk>")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer("b a1").input_ids == [4, 5, 3, 6]
    assert tokenizer.decode([4, 5, 3, 6]) == "b a1"
    assert tokenizer.decode([4, 1, 0], skip_special_tokens=True) == "b"
    assert tokenizer("bzb").input_ids == [4, 2, 4]
    assert tokenizer("").input_ids == []
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize("text", ["  a  ", " a\nb\ta", "aaaa", "\n", "<>a<"])
def test_text_comes_back_as_it_was(text: str) -> None:
    tokenizer = character_tokenizer(" ab\n\t<>", context_tokens=64)
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_written_as_text_are_one_token() -> None:
    tokenizer = character_tokenizer("<>aeos", context_tokens=64)
    assert tokenizer("a<eos>").input_ids == [5, 1]


def test_it_is_an_ordinary_tokenizer_on_disk(tmp_path: Path) -> None:
    character_tokenizer("ab", context_tokens=64).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("ba").input_ids == [4, 3]
    assert loaded.decode([4, 3, 1]) == f"ba{EOS}"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


def test_any_script_is_a_character() -> None:
    tokenizer = character_tokenizer("\u00e9\u4e2d\U0001f600", context_tokens=8)
    assert tokenizer("\U0001f600\u00e9").input_ids == [5, 3]
    assert tokenizer.decode([4, 5]) == "\u4e2d\U0001f600"


def test_an_alphabet_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        character_tokenizer("", context_tokens=8)
    with pytest.raises(ConfigError, match="repeated: 'ab'"):
        character_tokenizer("abcab", context_tokens=8)
