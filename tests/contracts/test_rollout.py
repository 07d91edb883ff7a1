"""What every rollout backend promises, over all that the folder has."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ebbtide import plugins
from ebbtide.errors import RolloutError, WeightSyncError
from ebbtide.rollout.base import Asleep, Awake, Loading
from ebbtide.types import Completion, SamplingParams, StopReason
from ebbtide.weightsync.base import NamedTensor
from tests.contracts.rollouts import (
    CONTEXT,
    EOS,
    MAKERS,
    VOCABULARY,
    Harness,
    answers,
    decode,
    opened,
    request,
    weights,
)

Open = Callable[..., AbstractAsyncContextManager[Harness]]
MARKS = {"vllm": (pytest.mark.vllm,)}
PROMPTS = ([3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [14, 3])
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in plugins.names("rollout")])
def backend(request: pytest.FixtureRequest) -> Open:
    name = str(request.param)
    assert name in MAKERS, f"tell tests/contracts/rollouts.py how to make rollout backend {name!r}"
    return lambda version=0, **config: opened(name, version, **config)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left"

    asyncio.run(bounded())


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] float64: temperature, then top-k, min-p and top-p, as plainly as can be."""
    if params.temperature == 0:
        return logits.double().softmax(0)
    scores = logits.double() / params.temperature
    kept = torch.ones(len(scores), dtype=torch.bool)
    if params.top_k:
        kept &= scores >= scores.sort(descending=True).values[min(params.top_k, len(scores)) - 1]
    if params.min_p:
        kept &= scores.softmax(0) >= params.min_p * scores.softmax(0).max()
    if params.top_p < 1:
        probabilities = scores.masked_fill(~kept, float("-inf")).softmax(0)
        mass = 0.0
        for token in probabilities.sort(descending=True, stable=True).indices.tolist():
            kept[token] &= mass < params.top_p
            mass += float(probabilities[token])
    return scores.masked_fill(~kept, float("-inf")).softmax(0)


def check_logprobs(harness: Harness, prompt: list[int], completion: Completion, params: SamplingParams) -> None:
    """Each token's log-prob is that of the distribution it was drawn from, under its own version."""
    tokens = completion.token_ids.tolist()
    for t, token in enumerate(tokens):
        logits = harness.logits(prompt + tokens[:t], int(completion.versions[t]))
        expected = float(distribution(logits, params)[token].log())
        assert abs(float(completion.logprobs[t]) - expected) <= harness.bound, (t, token)


def same(a: Completion, b: Completion) -> bool:
    return torch.equal(a.token_ids, b.token_ids) and a.stop_reason == b.stop_reason


def test_it_has_no_weights_before_the_first_push(backend: Open) -> None:
    async def test() -> None:
        async with backend(version=None) as harness:
            assert harness.state() == Loading(0)
            with pytest.raises(RolloutError, match="needs a backend that is awake"):
                await answers(harness.rollout, [request(0, [3])])
            await harness.push(5)
            assert harness.state() == Awake(5)
            await answers(harness.rollout, [request(0, [3])])

    run(test())


def test_each_request_is_answered_once_in_the_contracts_types(backend: Open) -> None:
    async def test() -> None:
        async with backend(version=3) as harness:
            requests = [request(17 * i + 5, PROMPTS[i % 4], max_tokens=6) for i in range(40)]
            for completion in (await answers(harness.rollout, requests)).values():
                C = len(completion.token_ids)
                assert 1 <= C <= 6
                assert completion.token_ids.dtype == torch.int64
                assert (completion.logprobs.dtype, completion.logprobs.shape) == (torch.float32, (C,))
                assert completion.versions.dtype == torch.int32
                assert completion.versions.tolist() == [3] * C
                assert float(completion.logprobs.max()) <= 1e-6
                for part in (completion.token_ids, completion.logprobs, completion.versions):
                    assert part.device.type == "cpu"
                    assert part.untyped_storage().nbytes() == part.nbytes, "a completion keeps nothing else alive"

    run(test())


def test_no_requests_are_no_completions(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            assert await answers(harness.rollout, []) == {}

    run(test())


def test_greedy_takes_the_likeliest_token(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, prompt, temperature=0.0, max_tokens=12) for i, prompt in enumerate(PROMPTS)]
            found = await answers(harness.rollout, requests)
            for i, prompt in enumerate(PROMPTS):
                tokens = found[i].token_ids.tolist()
                for t, token in enumerate(tokens):
                    assert token == int(harness.logits(prompt + tokens[:t], 0).argmax())
                check_logprobs(harness, prompt, found[i], requests[i].sampling)

    run(test())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_logprobs_are_of_the_distribution_really_sampled_from(backend: Open, kind: dict[str, Any]) -> None:
    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, PROMPTS[i % 4], max_tokens=10, **kind) for i in range(8)]
            found = await answers(harness.rollout, requests)
            for item in requests:
                check_logprobs(harness, item.prompt_ids.tolist(), found[item.request_id], item.sampling)

    run(test())


def test_many_kinds_of_sampling_in_one_call(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            kinds = [*KINDS, {"temperature": 0.0}]
            requests = [request(i, PROMPTS[i % 4], **kinds[i % len(kinds)]) for i in range(2 * len(kinds))]
            found = await answers(harness.rollout, requests)
            for item in requests:
                check_logprobs(harness, item.prompt_ids.tolist(), found[item.request_id], item.sampling)
                alone = await answers(harness.rollout, [item])
                assert same(alone[item.request_id], found[item.request_id])

    run(test())


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.6, "top_k": 5}], ids=str)
def test_tokens_come_as_often_as_they_are_likely(backend: Open, kind: dict[str, Any]) -> None:
    """Chi-square of 2,000 first tokens; its 99.9 % quantile for at most 14 degrees of freedom is 36.1."""

    async def test() -> None:
        async with backend(max_concurrent=256) as harness:
            requests = [request(i, PROMPTS[0], max_tokens=1, **kind) for i in range(2000)]
            found = await answers(harness.rollout, requests)
            counts = torch.bincount(torch.cat([item.token_ids for item in found.values()]), minlength=VOCABULARY)
            expected = 2000 * distribution(harness.logits(PROMPTS[0], 0), requests[0].sampling)
            assert int(counts[expected == 0].sum()) == 0
            likely = expected >= 5
            assert int(likely.sum()) >= 3
            chi_square = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
            assert float(chi_square) < 36.1

    run(test())


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, PROMPTS[i % 4], max_tokens=4 + i % 9) for i in range(24)]
            found = await answers(harness.rollout, requests)
            for order in (requests[::-1], requests[5:9] + requests[:2], requests[7:8]):
                again = await answers(harness.rollout, order)
                assert all(same(again[item.request_id], found[item.request_id]) for item in order)
            renamed = [replace(item, request_id=item.request_id + 100) for item in requests]
            other = await answers(harness.rollout, renamed)
            assert all(same(other[i + 100], found[i]) for i in range(24))
            reseeded = await answers(harness.rollout, [replace(item, seed=item.seed + 1000) for item in requests])
            assert sum(same(reseeded[i], found[i]) for i in range(24)) < 6
        async with backend(max_concurrent=3) as narrow:
            again = await answers(narrow.rollout, requests)
            assert all(same(again[i], found[i]) for i in range(24))

    run(test())


def test_completions_of_one_prompt_differ(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            prompt = torch.tensor(PROMPTS[0])
            requests = [replace(request(i, PROMPTS[0], ignore_eos=True), prompt_ids=prompt) for i in range(16)]
            found = await answers(harness.rollout, requests)
            assert len({tuple(item.token_ids.tolist()) for item in found.values()}) > 10
            for item in found.values():
                check_logprobs(harness, PROMPTS[0], item, requests[0].sampling)

    run(test())


def test_end_tokens_and_limits_end_a_completion_and_say_so(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            found = await answers(harness.rollout, [request(i, PROMPTS[i % 4], temperature=1.5) for i in range(100)])
            for item in found.values():
                tokens = item.token_ids.tolist()
                assert EOS not in tokens[:-1]
                assert item.stop_reason == (StopReason.EOS if tokens[-1] == EOS else StopReason.LENGTH)
                assert item.stop_reason == StopReason.EOS or len(tokens) == 8
            assert {item.stop_reason for item in found.values()} == {StopReason.EOS, StopReason.LENGTH}
            requests = [request(i, PROMPTS[i % 4], temperature=1.5, ignore_eos=True) for i in range(100)]
            found = await answers(harness.rollout, requests)
            assert all(len(item.token_ids) == 8 for item in found.values())
            assert all(item.stop_reason == StopReason.LENGTH for item in found.values())
            assert any(EOS in item.token_ids.tolist()[:-1] for item in found.values())

    run(test())


def test_stop_ids_end_a_completion(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, PROMPTS[i % 4], temperature=1.5, stop_ids=(5, 9)) for i in range(100)]
            found = await answers(harness.rollout, requests)
            for item in found.values():
                tokens = item.token_ids.tolist()
                assert not {5, 9, EOS} & set(tokens[:-1])
                assert (item.stop_reason == StopReason.STOP) == (tokens[-1] in (5, 9))
            assert {item.stop_reason for item in found.values()} == set(StopReason) - {StopReason.ABORTED}

    run(test())


def test_stop_strings_end_a_completion_once_the_text_has_them(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            plain = [request(i, PROMPTS[i % 4], temperature=2.0, max_tokens=30, ignore_eos=True) for i in range(60)]
            whole = await answers(harness.rollout, plain)
            texts = [decode(item.token_ids.tolist()) for item in whole.values()]
            stop = (texts[0][10:12], texts[1][5:8])  # of two and three characters, which do occur
            requests = [replace(item, sampling=replace(item.sampling, stop=stop)) for item in plain]
            found = await answers(harness.rollout, requests)
            for i, item in found.items():
                text = decode(item.token_ids.tolist())
                assert not any(word in decode(item.token_ids.tolist()[:-1]) for word in stop)
                assert (item.stop_reason == StopReason.STOP) == any(word in text for word in stop)
                assert torch.equal(item.token_ids, whole[i].token_ids[: len(item.token_ids)])
            assert found[0].stop_reason == found[1].stop_reason == StopReason.STOP

    run(test())


def test_prompts_of_every_length_up_to_the_context(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            prompts = {P: [3 + (5 * t) % 12 for t in range(P)] for P in range(1, CONTEXT)}
            requests = [request(P, prompt, max_tokens=6, ignore_eos=True) for P, prompt in prompts.items()]
            found = await answers(harness.rollout, requests)
            for P, item in found.items():
                assert len(item.token_ids) == min(6, CONTEXT - P)
                assert item.stop_reason == StopReason.LENGTH
                check_logprobs(harness, prompts[P], item, requests[0].sampling)

    run(test())


def test_requests_that_cannot_be_answered_are_refused_and_the_backend_goes_on(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            fine = request(0, [3])
            for bad, text in (
                (request(1, [3] * CONTEXT), "leave room in the context"),
                (request(1, []), "needs at least 1 token"),
                (request(1, [3, VOCABULARY]), "the vocabulary"),
                (request(1, [-1]), "the vocabulary"),
                (request(0, [3]), "two requests have it"),
            ):
                with pytest.raises(RolloutError, match=text):
                    await answers(harness.rollout, [fine, bad])
            await answers(harness.rollout, [fine])
            await harness.push(1)

    run(test())


def test_a_prefix_is_continued_as_if_never_interrupted(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, PROMPTS[i % 4], max_tokens=12, ignore_eos=True) for i in range(8)]
            whole = await answers(harness.rollout, requests)

            def cut(i: int, C: int) -> Completion:
                item = whole[i]
                return Completion(i, item.token_ids[:C], item.logprobs[:C], item.versions[:C], StopReason.ABORTED)

            await harness.push(0)
            parts = [replace(item, prefix=cut(item.request_id, 1 + item.request_id)) for item in requests]
            found = await answers(harness.rollout, parts)
            for i, item in found.items():
                assert same(item, whole[i])
                assert torch.equal(item.logprobs[: 1 + i], whole[i].logprobs[: 1 + i])
                check_logprobs(harness, PROMPTS[i % 4], item, requests[i].sampling)
            finished = replace(requests[0], prefix=cut(0, 12))
            with pytest.raises(RolloutError, match="its prefix has as many"):
                await answers(harness.rollout, [finished])

    run(test())


async def collect(stream: AsyncIterator[Completion], into: list[Completion]) -> None:
    async for completion in stream:
        into.append(completion)


def test_a_pause_comes_at_once_and_a_resume_finishes_under_the_new_weights(backend: Open) -> None:
    """256 requests in flight; each token carries the version that produced it, and its log-prob is of that version."""

    async def test() -> None:
        async with backend(max_concurrent=256) as harness:
            requests = [request(i, PROMPTS[i % 4], max_tokens=30, ignore_eos=i % 2 == 0) for i in range(256)]
            done: list[Completion] = []
            consumer = asyncio.create_task(collect(harness.rollout.generate(requests), done))
            while not done:
                await asyncio.sleep(0)
            async with asyncio.timeout(1.0):
                await harness.rollout.pause()
            await asyncio.sleep(0.02)
            num_before = len(done)
            await asyncio.sleep(0.1)
            assert len(done) == num_before < 256
            await harness.push(1)
            assert harness.state() == Awake(1)
            await asyncio.sleep(0.02)
            assert len(done) == num_before, "a push is no resume"
            await harness.rollout.resume()
            await consumer
            assert sorted(item.request_id for item in done) == list(range(256))
            late = done[num_before:]
            for item in late:
                assert item.versions.tolist() == sorted(item.versions.tolist())
                assert int(item.versions[-1]) == 1
            assert any(set(item.versions.tolist()) == {0, 1} for item in late)
            for item in late[:: len(late) // 12]:
                check_logprobs(harness, list(PROMPTS[item.request_id % 4]), item, requests[0].sampling)

    run(test())


def test_a_pause_without_a_push_changes_no_token(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, PROMPTS[i % 4], max_tokens=30) for i in range(20)]
            whole = await answers(harness.rollout, requests)
            done: list[Completion] = []
            consumer = asyncio.create_task(collect(harness.rollout.generate(requests), done))
            while not consumer.done():
                await harness.rollout.pause()
                await harness.rollout.resume()
                await asyncio.sleep(0)
            await consumer
            assert all(same(item, whole[item.request_id]) for item in done)
            assert len(done) == 20

    run(test())


def test_weights_and_sleep_are_refused_under_running_requests(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            done: list[Completion] = []
            requests = [request(i, PROMPTS[i % 4], max_tokens=40, ignore_eos=True) for i in range(16)]
            consumer = asyncio.create_task(collect(harness.rollout.generate(requests), done))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(RolloutError, match="Pause first"):
                await harness.push(1)
            with pytest.raises(RolloutError, match="Pause first"):
                await harness.rollout.sleep(1)
            assert harness.state() == Awake(0)
            await consumer
            assert len(done) == 16
            assert {int(item.versions.max()) for item in done} == {0}

    run(test())


def test_a_push_that_breaks_leaves_loading_and_only_a_whole_one_leads_out(backend: Open) -> None:
    def broken() -> Iterator[NamedTensor]:
        yield weights(1)[0]
        raise ValueError("gathering failed")

    async def test() -> None:
        async with backend() as harness:
            before = await answers(harness.rollout, [request(0, [3, 4])])
            with pytest.raises(WeightSyncError, match="gathering failed"):
                await harness.push(1, broken())
            assert harness.state() == Loading(1)
            with pytest.raises(RolloutError, match="Push weights first"):
                await answers(harness.rollout, [request(0, [3, 4])])
            with pytest.raises(RolloutError):
                await harness.rollout.sleep(1)
            await harness.push(0)
            assert harness.state() == Awake(0)
            after = await answers(harness.rollout, [request(0, [3, 4])])
            assert torch.equal(after[0].logprobs, before[0].logprobs)

    run(test())


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_give_the_same_answers_bit_for_bit(backend: Open, level: Any) -> None:
    async def test() -> None:
        async with backend(version=4) as harness:
            requests = [request(i, PROMPTS[i % 4]) for i in range(8)]
            before = await answers(harness.rollout, requests)
            await harness.rollout.sleep(level)
            assert harness.state() == Asleep(level)
            with pytest.raises(RolloutError, match="needs a backend that is awake"):
                await answers(harness.rollout, requests)
            with pytest.raises(RolloutError, match="sleeping"):
                await harness.push(5)
            with pytest.raises(RolloutError):
                await harness.rollout.resume()
            await harness.rollout.wake("cache")
            assert harness.state() == Asleep(level)
            await harness.rollout.wake("weights")
            if level == 1:
                assert harness.state() == Awake(4)
            else:
                assert harness.state() == Loading(4)
                await harness.push(4)
            await harness.rollout.wake()
            assert harness.state() == Awake(4)
            after = await answers(harness.rollout, requests)
            for i, item in after.items():
                assert torch.equal(item.token_ids, before[i].token_ids)
                assert torch.equal(item.logprobs, before[i].logprobs)

    run(test())


@pytest.mark.parametrize("level", [1, 2])
def test_paused_requests_survive_a_sleep(backend: Open, level: Any) -> None:
    """One step of a run that shares a device: pause, sleep, wake, push, resume."""

    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, PROMPTS[i % 4], max_tokens=30, ignore_eos=True) for i in range(12)]
            done: list[Completion] = []
            consumer = asyncio.create_task(collect(harness.rollout.generate(requests), done))
            for _ in range(6):
                await asyncio.sleep(0)
            await harness.rollout.pause()
            await harness.rollout.sleep(level)
            await harness.rollout.wake("weights")
            await harness.push(1)
            await harness.rollout.wake("cache")
            await harness.rollout.resume()
            await consumer
            assert len(done) == 12
            for item in done:
                assert item.versions.tolist() == sorted(item.versions.tolist())
                check_logprobs(harness, list(PROMPTS[item.request_id % 4]), item, requests[0].sampling)

    run(test())


def test_closing_the_iterator_cancels_what_is_unfinished(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, PROMPTS[i % 4], max_tokens=1 + 3 * i) for i in range(12)]
            async with aclosing(harness.rollout.generate(requests)) as stream:  # type: ignore[type-var]
                first = await anext(stream)
            assert len(first.token_ids) <= 34
            await harness.push(1)  # nothing runs any more, so nothing has to be paused
            assert len(await answers(harness.rollout, requests)) == 12

    run(test())


def test_cancelling_the_task_cancels_the_requests(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            requests = [request(i, PROMPTS[i % 4], max_tokens=40, ignore_eos=True) for i in range(32)]
            consumer = asyncio.create_task(collect(harness.rollout.generate(requests), []))
            for _ in range(4):
                await asyncio.sleep(0)
            consumer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consumer
            await harness.push(1)
            await answers(harness.rollout, requests[:2])

    run(test())


def test_two_calls_at_once_get_their_own_answers(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            first = [request(i, PROMPTS[i % 4]) for i in range(10)]
            second = [request(100 + i, PROMPTS[i % 4]) for i in range(10)]
            alone = await answers(harness.rollout, first + second)
            found = await asyncio.gather(answers(harness.rollout, first), answers(harness.rollout, second))
            for part in found:
                assert all(same(item, alone[i]) for i, item in part.items())

    run(test())


def test_requests_that_come_while_paused_wait(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            await harness.rollout.pause()
            done: list[Completion] = []
            consumer = asyncio.create_task(collect(harness.rollout.generate([request(0, [3])]), done))
            await asyncio.sleep(0.05)
            assert not done
            assert not consumer.done()
            await harness.rollout.resume()
            await consumer
            assert len(done) == 1

    run(test())


def test_a_closed_backend_refuses_everything_and_ends_what_waits(backend: Open) -> None:
    async def test() -> None:
        async with backend() as harness:
            await harness.rollout.pause()
            consumer = asyncio.create_task(collect(harness.rollout.generate([request(0, [3])]), []))
            await asyncio.sleep(0.01)
            await harness.rollout.close()
            await harness.rollout.close()
            with pytest.raises(RolloutError, match="closed"):
                await consumer
            with pytest.raises(RolloutError, match="closed"):
                await answers(harness.rollout, [request(0, [3])])
            with pytest.raises(RolloutError, match="closed"):
                await harness.push(1)

    run(test())
