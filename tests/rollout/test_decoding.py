"""Continuous batching: who runs when, what is computed, and that none of it shows in the answers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide.errors import ModelError, RolloutError
from ebbtide.models.cache import KeyValueCache
from ebbtide.models.policy import Policy
from ebbtide.rollout.decoding import Decoder, Limits
from ebbtide.types import Completion, GenerateRequest, SamplingParams, StopReason, TrainBatch
from tests.models.zoo import VOCABULARY, make

CONTEXT = 128
EOS = 2


def limits(max_concurrent: int = 64, max_prefill_tokens: int = 4096) -> Limits:
    return Limits(max_concurrent, max_prefill_tokens, CONTEXT, (EOS,))


def requests_of(num: int, *, prompt: Callable[[int], Tensor] | None = None, **sampling: Any) -> list[GenerateRequest]:
    def own(i: int) -> Tensor:
        return torch.arange(3, 4 + i % 5)

    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return [GenerateRequest(i, (prompt or own)(i), params, 1000 + i) for i in range(num)]


def finish(decoder: Decoder, version: int = 0) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while not decoder.is_done:
        for completion in decoder.step(version):
            assert completion.request_id not in found
            found[completion.request_id] = completion
    return found


def same(a: dict[int, Completion], b: dict[int, Completion]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(item.token_ids, b[i].token_ids) for i, item in a.items())


class Watched:
    """Counts what a model is given, forward by forward."""

    def __init__(self, model: Any) -> None:
        self.tokens: list[int] = []
        self._handle = model.get_decoder().register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        self.tokens.append(kwargs["input_ids"].shape[1])

    def close(self) -> None:
        self._handle.remove()


def test_a_prompt_that_several_share_is_computed_once() -> None:
    model, shared = make("llama"), torch.arange(3, 13)
    watched = Watched(model)
    finish(Decoder(model, requests_of(8, prompt=lambda _: shared, max_tokens=2, ignore_eos=True), limits()))
    assert watched.tokens == [10, 8]
    watched.close()
    equal = Watched(model)
    finish(Decoder(model, requests_of(8, prompt=lambda _: shared.clone(), max_tokens=2, ignore_eos=True), limits()))
    assert equal.tokens == [80, 8], "equal tensors are not looked through"


def test_newcomers_join_when_a_quarter_is_free() -> None:
    model = make("llama")
    watched = Watched(model)
    lengths = [2, 3, 4, 5, 2, 2]
    requests = [
        GenerateRequest(i, torch.tensor([3, 4]), SamplingParams(max_tokens=C, ignore_eos=True), i)
        for i, C in enumerate(lengths)
    ]
    decoder = Decoder(model, requests, limits(max_concurrent=4))
    found = finish(decoder)
    assert {i: len(item.token_ids) for i, item in found.items()} == dict(enumerate(lengths))
    # Four prompts; all step and one ends; its place is filled, and so on, one at a time.
    assert watched.tokens == [8, 4, 2, 4, 2, 4 - 1, 1]


def test_prefills_are_bounded_and_a_longer_prompt_goes_alone() -> None:
    model = make("llama")
    watched = Watched(model)
    prompts = [torch.arange(3, 3 + P) for P in (6, 6, 20, 3, 3, 3)]
    requests = requests_of(6, prompt=lambda i: prompts[i], max_tokens=1)
    found = finish(Decoder(model, requests, limits(max_prefill_tokens=12)))
    assert watched.tokens == [12, 20, 9]
    assert len(found) == 6


@pytest.mark.parametrize("max_concurrent", [1, 3, 7])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gemma2", "qwen3_moe"])
def test_who_decodes_together_does_not_show(model_type: str, max_concurrent: int) -> None:
    model, requests = make(model_type), requests_of(13)
    together = finish(Decoder(model, requests, limits()))
    assert same(finish(Decoder(model, requests, limits(max_concurrent, max_prefill_tokens=5))), together)
    assert len({item.stop_reason for item in together.values()}) == 2


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_releasing_at_any_time_changes_no_token(steps: int) -> None:
    model, requests = make("gemma3_text"), requests_of(9, max_tokens=20)
    whole = finish(Decoder(model, requests, limits(max_concurrent=5)))
    decoder = Decoder(model, requests, limits(max_concurrent=5))
    found: dict[int, Completion] = {}
    while not decoder.is_done:
        for _ in range(steps):
            if not decoder.is_done:
                found |= {item.request_id: item for item in decoder.step(0)}
        decoder.release()
    assert same(found, whole)


def test_releasing_frees_the_cache_and_keeps_versions() -> None:
    model, requests = make("llama"), requests_of(3, max_tokens=4, ignore_eos=True)
    decoder = Decoder(model, requests, limits())
    decoder.step(5)
    decoder.step(5)
    assert isinstance(decoder._cache, KeyValueCache)
    decoder.release()
    assert vars(decoder)["_cache"] is None
    assert not decoder.is_done
    for item in finish(decoder, version=6).values():
        assert item.versions.tolist() == [5, 5, 6, 6]


def test_long_completions_grow_the_cache() -> None:
    model = make("gemma3_text")
    requests = requests_of(2, max_tokens=200, ignore_eos=True)
    found = finish(Decoder(model, requests, limits()))
    assert [len(found[i].token_ids) for i in range(2)] == [CONTEXT - 1, CONTEXT - 2]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "granite", "cohere", "qwen3_moe"])
def test_logprobs_are_the_policys(model_type: str, temperature: float) -> None:
    """What training computes for the same tokens, packed and with shared prompts."""
    model, shared = make(model_type), torch.arange(3, 12)
    requests = requests_of(12, prompt=lambda _: shared, temperature=temperature, max_tokens=30)
    found = finish(Decoder(model, requests, limits(max_concurrent=5)))
    rows = [(shared, found[i].token_ids, found[i].logprobs) for i in range(12)]
    batch = TrainBatch.pack(rows, group_ids=[0] * 12)
    policy = Policy(model)
    with torch.no_grad():
        stats: Any = policy(policy.layout(batch), temperature=temperature)
    torch.testing.assert_close(batch.rollout_logprobs[batch.loss_mask], stats.logprobs, atol=1e-5, rtol=0)


def test_answers_are_the_same_bits_from_run_to_run() -> None:
    model, requests = make("llama"), requests_of(20, temperature=0.7, top_p=0.9)
    first, second = (finish(Decoder(model, requests, limits(max_concurrent=6))) for _ in range(2))
    for i, item in first.items():
        assert torch.equal(item.token_ids, second[i].token_ids)
        assert torch.equal(item.logprobs, second[i].logprobs)


def test_bfloat16_generates_too() -> None:
    model = make("llama").to(torch.bfloat16)
    found = finish(Decoder(model, requests_of(5), limits()))
    assert all(item.logprobs.dtype == torch.float32 for item in found.values())


def test_weights_that_are_not_finite_are_an_error() -> None:
    model = make("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="logits under the weights of version 3 are not finite"):
        Decoder(model, requests_of(2), limits()).step(3)


def test_a_layer_that_attends_elsewhere_is_an_error() -> None:
    model = make("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="2 of 3 layers attended through the plan"):
        Decoder(model, requests_of(2), limits()).step(0)


def decode(token_ids: list[int]) -> str:
    """Token 9 is half a character: it shows only once the next one is there."""
    text = ""
    for i, token in enumerate(token_ids):
        if token == 9:
            continue
        text += ("[" if i and token_ids[i - 1] == 9 else "") + chr(ord("a") + token % 26)
    return text


def test_stop_strings_over_several_tokens_end_when_their_last_token_comes() -> None:
    model = make("llama")
    plain = requests_of(40, temperature=3.0, max_tokens=40, ignore_eos=True)
    whole = finish(Decoder(model, plain, limits()))
    target = decode(whole[0].token_ids.tolist())[20:23]
    requests = requests_of(40, temperature=3.0, max_tokens=40, ignore_eos=True, stop=(target, "zzzzzz"))
    found = finish(Decoder(model, requests, limits(), decode))
    assert found[0].stop_reason == StopReason.STOP
    for i, item in found.items():
        tokens = item.token_ids.tolist()
        assert tokens == whole[i].token_ids.tolist()[: len(tokens)]
        assert target not in decode(tokens[:-1])
        assert (item.stop_reason == StopReason.STOP) == (target in decode(tokens))


def test_an_end_token_comes_before_a_stop_and_a_stop_before_the_limit() -> None:
    model = make("llama")
    every = tuple(range(VOCABULARY))
    for max_tokens in (1, 5):
        found = finish(
            Decoder(model, requests_of(60, temperature=4.0, max_tokens=max_tokens, stop_ids=every), limits())
        )
        for item in found.values():
            expected = StopReason.EOS if int(item.token_ids[-1]) == EOS else StopReason.STOP
            assert (item.stop_reason, len(item.token_ids)) == (expected, 1)


def test_no_requests_are_done_at_once() -> None:
    assert Decoder(make("llama"), [], limits()).is_done


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_equal_histories_are_computed_once(model_type: str) -> None:
    """Near to greedy, completions of one prompt stay alike for a while; what is drawn is what each draws alone."""
    model = make(model_type)
    prompts = [torch.arange(3, 9), torch.arange(4, 8)]
    requests = requests_of(16, prompt=lambda i: prompts[i % 2], max_tokens=24, temperature=0.25, ignore_eos=True)
    watched = Watched(model)
    together = finish(Decoder(model, requests, limits()))
    watched.close()
    alone: dict[int, Completion] = {}
    for request in requests:
        alone |= finish(Decoder(model, [request], limits()))
    assert same(together, alone)
    for i, completion in together.items():
        torch.testing.assert_close(completion.logprobs, alone[i].logprobs, atol=1e-5, rtol=0)
    distinct = [len({(i % 2, *together[i].token_ids[:n].tolist()) for i in together}) for n in range(1, 24)]
    assert watched.tokens == [10, *(number if 4 * number <= 48 else 16 for number in distinct)]
    assert min(distinct) < 12, "else this shows nothing"


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_equal_histories_are_decoded_once_and_nothing_shows(model_type: str) -> None:
    """Eight prompts, eight requests each, drawn so sharply that many stay equal; some rows end earlier than others."""
    model = make(model_type)
    prompts = [torch.arange(3, 4 + p) for p in range(8)]

    def requests(prompt: Callable[[int], Tensor]) -> list[GenerateRequest]:
        return [
            GenerateRequest(i, prompt(i), SamplingParams(max_tokens=3 + i % 5, temperature=0.15), 7 * i)
            for i in range(64)
        ]

    watched = Watched(model)
    found = finish(Decoder(model, requests(lambda i: prompts[i // 8]), limits()))
    num_tokens = sum(watched.tokens)
    assert num_tokens < sum(len(item.token_ids) for item in found.values()), "several rows were one"
    apart = finish(Decoder(model, requests(lambda i: prompts[i // 8].clone()), limits(max_concurrent=5)))
    watched.close()
    assert same(found, apart)
    for i, item in found.items():
        torch.testing.assert_close(item.logprobs, apart[i].logprobs, atol=1e-5, rtol=0)
