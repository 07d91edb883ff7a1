"""Draws against plain references: frequencies, truncation with ties, log-probs, and the random numbers themselves."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebbtide.rollout.sampling import RowSampling, streams, uniform
from ebbtide.types import SamplingParams

CPU = torch.device("cpu")
M64 = (1 << 64) - 1


def draw(logits: Tensor, *, seeds: Tensor | None = None, number: int = 0, **params: Any) -> tuple[Tensor, Tensor]:
    B = logits.shape[0]
    sampling = RowSampling.of([SamplingParams(max_tokens=1, **params)] * B, CPU)
    seeds = torch.arange(B) if seeds is None else seeds
    return sampling.draw(logits, streams(seeds), torch.full((B,), number))


def kept(logits: list[float], **params: Any) -> list[int]:
    """Which tokens 4,000 draws ever give."""
    tokens, _ = draw(torch.tensor([logits]).expand(4000, -1), **params)
    return sorted(set(tokens.tolist()))


def chi_square(logits: Tensor, num_draws: int, **params: Any) -> float:
    """Of draws of one row against its softmax, per degree of freedom."""
    tokens, _ = draw(logits.expand(num_draws, -1), **params)
    expected = num_draws * logits[0].double().softmax(0)
    counts = torch.bincount(tokens, minlength=logits.shape[1])
    likely = expected >= 5
    rest = torch.stack([counts[~likely].sum(), expected[~likely].sum()])
    terms = (counts[likely] - expected[likely]) ** 2 / expected[likely]
    total = terms.sum() + ((rest[0] - rest[1]) ** 2 / rest[1] if rest[1] > 0 else 0)
    return float(total) / int(likely.sum())


def splitmix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & M64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & M64
    return value ^ (value >> 31)


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 20))
def test_random_numbers_are_splitmix64s(seed: int, number: int) -> None:
    """In Python's whole numbers, where nothing overflows and shifts are logical."""
    state = (splitmix(seed & M64) + (number + 1) * 0x9E3779B97F4A7C15) & M64
    found = uniform(streams(torch.tensor([seed])), torch.tensor([number]))
    assert found.dtype == torch.float64
    assert float(found) == (splitmix(state) >> 12) / 2**52
    assert 0 <= float(found) < 1


def test_random_numbers_are_uniform_along_seeds_and_along_tokens() -> None:
    for seeds, numbers in ((torch.arange(20_000), torch.zeros(1)), (torch.zeros(1), torch.arange(20_000))):
        found = uniform(streams(seeds.long()), numbers.long())
        counts = torch.histc(found.float(), bins=50, min=0, max=1)
        assert float(((counts - 400) ** 2 / 400).sum()) < 85.4  # 99.9 % quantile for 49 degrees of freedom
        pairs = torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1]
        assert abs(float(pairs)) < 0.03


def test_runs_whose_seeds_differ_by_the_increment_share_no_sequence() -> None:
    """Seeds of requests are made as seed * golden + id; a plain counter would give run 1 run 0's numbers, shifted."""
    golden = 0x9E3779B97F4A7C15 - (1 << 64)
    first = uniform(streams(torch.tensor([5])), torch.arange(50))
    second = uniform(streams(torch.tensor([5 + golden])), torch.arange(50))
    assert not set(first.tolist()) & set(second.tolist())


@pytest.mark.parametrize("V", [2, 15, 255, 257, 1000, 4096, 5000])
def test_tokens_come_as_often_as_they_are_likely(V: int) -> None:
    """Both ways of drawing, with vocabularies that fill their blocks and others."""
    torch.manual_seed(V)
    logits = torch.randn(1, V) * 2
    assert chi_square(logits, 20_000) < 1.0 + 4.5 * math.sqrt(2 / max(V // 8, 1))


def test_the_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 4.0]])
    tokens, logprobs = draw(logits.expand(50, -1), temperature=0.5)
    expected = (logits[0] / 0.5).log_softmax(0)
    torch.testing.assert_close(logprobs, expected[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("V", [20, 3000])
def test_both_ways_of_drawing_agree_with_inverting_the_distribution(V: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(500, V) * 3
    tokens, logprobs = draw(logits, number=3)
    levels = uniform(streams(torch.arange(500)), torch.tensor([3]))
    up_to = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(up_to, levels[:, None], right=True).squeeze(1)
    assert float((tokens == expected).float().mean()) > 0.995, "only levels within rounding of a border may differ"
    reference = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), reference, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [2, 4]),
        ({"top_k": 1}, [4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        # Probabilities are 0.05, 0.1, 0.3, 0.15, 0.4; the likeliest come first.
        ({"top_p": 0.39}, [4]),
        ({"top_p": 0.41}, [2, 4]),
        ({"top_p": 0.71}, [2, 3, 4]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.3}, [2, 3, 4]),
        ({"min_p": 0.99}, [4]),
        # Of top-k's three, renormalised to 0.353, 0.176, 0.471.
        ({"top_k": 3, "top_p": 0.8}, [2, 4]),
        ({"top_k": 3, "min_p": 0.5, "top_p": 0.99}, [2, 4]),
    ],
    ids=str,
)
def test_truncation_by_hand(params: dict[str, Any], expected: list[int]) -> None:
    logits = torch.tensor([0.05, 0.1, 0.3, 0.15, 0.4]).log().tolist()
    assert kept(logits, **params) == expected


def test_ties() -> None:
    """Top-k and min-p keep all that are as likely as the last one kept; top-p takes the lower ids first."""
    assert kept([0.0, 1.0, 1.0, 1.0], top_k=2) == [1, 2, 3]
    assert kept([1.0, 1.0, 1.0, 1.0], min_p=0.9) == [0, 1, 2, 3]
    assert kept([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]
    assert kept([1.0, 1.0, 1.0, 1.0], top_p=0.51) == [0, 1, 2]


def test_a_row_that_keeps_everything_loses_nothing_beside_one_that_does_not() -> None:
    """Rounded sums reach 1 before the end, which must not cut the tail of a row with top_p=1."""
    logits = torch.cat([torch.zeros(2, 1), torch.full((2, 5000), -18.0)], dim=1)
    sampling = RowSampling.of([SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, top_p=0.9)], CPU)
    truncated = sampling._truncated(logits)
    assert torch.equal(truncated[0], logits[0])
    assert int(truncated[1].isfinite().sum()) == 1


def test_each_row_by_its_own_parameters() -> None:
    torch.manual_seed(0)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 2.0, "top_k": 5}]
    params = [SamplingParams(max_tokens=1, **kinds[i % 6]) for i in range(60)]  # type: ignore[arg-type]
    logits, numbers = torch.randn(60, 30) * 2, torch.arange(60) % 7
    tokens, logprobs = RowSampling.of(params, CPU).draw(logits, streams(torch.arange(60)), numbers)
    for i in range(60):
        row = slice(i, i + 1)
        alone = RowSampling.of([params[i]], CPU).draw(logits[row], streams(torch.tensor([i])), numbers[row])
        assert int(alone[0]) == int(tokens[i])
        assert float(alone[1]) == pytest.approx(float(logprobs[i]), abs=1e-6)
    some = torch.tensor([41, 3, 20])
    chosen = RowSampling.of(params, CPU).rows(some).draw(logits[some], streams(some), numbers[some])
    assert torch.equal(chosen[0], tokens[some])


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    st.integers(0, 20),
    st.sampled_from([0.01, 0.7, 1.0]),
    st.sampled_from([0.0, 0.2]),
)
def test_logprobs_are_those_of_what_is_left(
    V: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Whatever the parameters: a drawn token is one that is left, and the left ones' probabilities sum to 1."""
    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(seed)) * 4
    tokens, logprobs = draw(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampling = RowSampling.of([params] * 8, CPU)
    if temperature == 0:
        assert torch.equal(tokens, logits.argmax(-1))
        expected = logits.double().log_softmax(-1)
    else:
        expected = sampling._truncated(logits / temperature).double().log_softmax(-1)
    found = expected.gather(1, tokens[:, None]).squeeze(1)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(logprobs.double(), found, atol=3e-6, rtol=0)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((3000, 300), float("-inf"))
    logits[:, 77] = 0.0
    logits[:, 299] = -1.0
    tokens, _ = draw(logits)
    assert set(tokens.tolist()) == {77, 299}
    first_is_none = torch.tensor([[float("-inf"), 0.0]]).expand(1000, -1)
    assert set(draw(first_is_none)[0].tolist()) == {1}


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    for V in (5, 500):
        for bad in (float("nan"), float("inf")):
            logits = torch.zeros(3, V)
            logits[1, 2] = bad
            kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.9}]
            for params in kinds:
                tokens, logprobs = draw(logits, **params)
                assert logprobs.isfinite().tolist() == [True, False, True]
                assert bool(((tokens >= 0) & (tokens < V)).all())
        all_gone = torch.full((1, V), float("-inf"))
        assert not bool(draw(all_gone)[1].isfinite())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype(dtype: torch.dtype) -> None:
    logits = torch.randn(50, 40).to(dtype)
    tokens, logprobs = draw(logits)
    assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=0)


def test_logits_are_read_only() -> None:
    for V in (20, 500):
        logits = torch.randn(4, V)
        before = logits.clone()
        draw(logits, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
        draw(logits)
        assert torch.equal(logits, before)


def test_what_is_neutral_costs_nothing() -> None:
    sampling = RowSampling.of([SamplingParams(max_tokens=1)] * 3, CPU)
    columns = (sampling.is_greedy, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    assert columns == (None,) * 5
