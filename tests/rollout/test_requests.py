from typing import Any

import pytest
import torch

from ebbtide.errors import RolloutError
from ebbtide.rollout.requests import check_requests
from ebbtide.types import Completion, GenerateRequest, SamplingParams, StopReason


def request(request_id: int, prompt: list[int], num_prefix: int | None = None, **sampling: Any) -> GenerateRequest:
    prefix = None
    if num_prefix is not None:
        ids = torch.ones(num_prefix, dtype=torch.long)
        prefix = Completion(request_id, ids, ids.float(), ids.int(), StopReason.ABORTED)
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return GenerateRequest(request_id, torch.tensor(prompt, dtype=torch.long), params, 0, prefix)


def check(*requests: GenerateRequest, has_tokenizer: bool = True) -> None:
    check_requests(requests, context_tokens=8, vocab_size=10, has_tokenizer=has_tokenizer)


def test_what_can_be_answered_passes() -> None:
    check()
    check(request(0, [1] * 7), request(1, [9]), request(2, [0], num_prefix=3), request(3, [1] * 5, num_prefix=2))
    check(request(0, [1], stop_ids=(3,)), has_tokenizer=False)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (request(7, []), r"requests\[7\]\.prompt_ids=0: a prompt needs at least 1 token"),
        (request(7, [1] * 8), "leave room in the context of 8"),
        (request(0, [1]), "request_id=0: two requests have it"),
        (request(7, [1, 10]), "prompt_ids=10: must be from 0 to 9, the vocabulary"),
        (request(7, [-3, 11]), "prompt_ids=-3: must be from 0 to 9"),
        (request(7, [1], num_prefix=4), r"requests\[7\]\.prefix=4: the request may draw 4 tokens"),
        (request(7, [1] * 6, num_prefix=2), "may draw 2 tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_named(bad: GenerateRequest, text: str) -> None:
    with pytest.raises(RolloutError, match=text):
        check(request(0, [1]), bad)


def test_stop_strings_need_a_tokenizer() -> None:
    check(request(0, [1], stop=("x",)))
    with pytest.raises(RolloutError, match="stop strings need a tokenizer"):
        check(request(0, [1], stop=("x",)), has_tokenizer=False)
