"""A tokenizer of single characters, as an ordinary fast tokenizer that `AutoTokenizer` loads again."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ebbtide.errors import ConfigError, problem

__all__ = ["EOS", "PAD", "SPECIAL", "character_tokenizer"]

PAD, EOS, UNKNOWN = SPECIAL = ("<pad>", "<eos>", "<unk>")


def character_tokenizer(alphabet: str, context_tokens: int) -> PreTrainedTokenizerBase:
    """One token a character of `alphabet`, after pad, end and unknown.

    Raises:
        ConfigError: the alphabet is empty or repeats a character.
    """
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if not alphabet or repeated:
        rule = f"must be distinct characters; repeated: {''.join(repeated)!r}" if alphabet else "must not be empty"
        raise ConfigError(problem("model.alphabet", alphabet, rule))
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
