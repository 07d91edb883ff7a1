import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.errors import DataError
from ebbtide.numerics import chunked
from ebbtide.numerics import logprobs as module
from ebbtide.numerics import tiles as tile_sizes
from ebbtide.numerics.chunked import Request, head_stats
from ebbtide.numerics.logprobs import Head, TokenStats, eager_token_stats, token_stats
from ebbtide.numerics.tiles import LogitRule
from tests.reference import token_stats as reference

N, D, V, K = 37, 16, 700, 5


@pytest.fixture(params=["tiles", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute: by several tiles, whatever the size, and by torch's operators."""
    monkeypatch.setattr(module, "_SMALL", 0 if request.param == "tiles" else 1 << 30)
    monkeypatch.setattr(tile_sizes, "_CPU_TILE", 1)
    return str(request.param)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles of 256 entries, the fewest, so that the vocabulary takes three."""
    monkeypatch.setattr(module, "_SMALL", 0)
    monkeypatch.setattr(tile_sizes, "_CPU_TILE", 1)


@dataclass
class Case:
    """Inputs, and upstream gradients for each result."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    candidates: Tensor
    upstream: tuple[Tensor, Tensor, Tensor]

    def head(self, **options: Any) -> Head:
        return Head(self.weight, self.bias, **options)

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None and x.requires_grad]


def make_case(dtype: torch.dtype = torch.float32, bias: bool = False, num_tokens: int = N, seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(dtype)

    return Case(
        normal(num_tokens, D).requires_grad_(),
        normal(V, D, scale=0.5).requires_grad_(),
        normal(V).requires_grad_() if bias else None,
        torch.randint(V, (num_tokens,), generator=draw),
        torch.randint(V, (num_tokens, K), generator=draw),
        (
            torch.randn(num_tokens, generator=draw),
            torch.randn(num_tokens, generator=draw),
            torch.randn(num_tokens, K, generator=draw),
        ),
    )


def objective(case: Case, stats: TokenStats | reference.Expected, entropy: bool = True, topk: bool = True) -> Tensor:
    of_logprobs, of_entropy, of_topk = case.upstream
    total = (of_logprobs.to(stats.logprobs.dtype) * stats.logprobs).sum()
    if entropy and stats.entropy is not None:
        total = total + (of_entropy.to(stats.logprobs.dtype) * stats.entropy).sum()
    if topk and stats.topk_logprobs is not None:
        total = total + (of_topk.to(stats.logprobs.dtype) * stats.topk_logprobs).sum()
    return total


def expect(case: Case, temperature: float | Tensor = 1.0, **options: Any) -> tuple[reference.Expected, list[Tensor]]:
    """The reference's results, and its gradients by hidden states, weight and bias."""
    doubles = [x.detach().double().requires_grad_() for x in case.leaves()]
    z = reference.logits(*doubles, **options)
    expected = reference.token_stats(z, case.targets, temperature=temperature, candidates=case.candidates)
    return expected, list(torch.autograd.grad(objective(case, expected), doubles))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach()
    return float((actual - expected).norm() / expected.norm())


def assert_same(actual: TokenStats, expected: TokenStats) -> None:
    for item in fields(TokenStats):
        one, other = getattr(actual, item.name), getattr(expected, item.name)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=item.name)


# Values worked out by hand


def test_two_tokens_by_hand(path: str) -> None:
    """Logits 0 and log 3: probabilities 1/4 and 3/4, entropy log 4 - 3/4 log 3."""
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    head = Head(torch.tensor([[0.0, 5.0], [math.log(3), 7.0]]))
    stats = token_stats(hidden, head, torch.tensor([1]), want_entropy=True, top_k=2)
    assert stats.entropy is not None
    assert stats.topk_ids is not None
    assert stats.topk_logprobs is not None
    assert stats.logprobs.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert stats.entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3), rel=1e-6)
    assert stats.topk_ids.tolist() == [[1, 0]]
    assert stats.topk_ids.dtype == torch.int32
    assert stats.topk_logprobs.exp().tolist()[0] == pytest.approx([0.75, 0.25], rel=1e-6)
    # d logprob / d hidden = W[1] - (W[0] + 3 W[1]) / 4 = (W[1] - W[0]) / 4
    (gradient,) = torch.autograd.grad(stats.logprobs.sum(), hidden)
    assert gradient.tolist()[0] == pytest.approx([math.log(3) / 4, 0.5], rel=1e-5)


def test_temperature_by_hand(path: str) -> None:
    """At temperature 1/2 logits 0 and log 3 become 0 and log 9."""
    head = Head(torch.tensor([[0.0], [math.log(3)]]))
    stats = token_stats(torch.ones(1, 1), head, torch.tensor([0]), temperature=0.5)
    assert stats.logprobs.exp().item() == pytest.approx(0.1, rel=1e-6)


def test_scale_comes_before_the_cap_and_temperature_after_it(path: str) -> None:
    """Product 4, scaled to 2, capped to 2 tanh(1), at temperature 2 it is tanh(1)."""
    head = Head(torch.tensor([[0.0], [4.0]]), softcap=2.0, logit_scale=0.5)
    stats = token_stats(torch.ones(1, 1), head, torch.tensor([1]), temperature=2.0)
    odds = math.exp(math.tanh(1.0))
    assert stats.logprobs.exp().item() == pytest.approx(odds / (1 + odds), rel=1e-6)


# Against float64

PER_TOKEN = torch.linspace(0.5, 2.0, N)
OPTIONS = [
    pytest.param({}, 1.0, False, id="plain"),
    pytest.param({}, 0.7, False, id="temperature"),
    pytest.param({}, PER_TOKEN, True, id="temperature a token, bias"),
    pytest.param({"softcap": 5.0}, 1.0, False, id="softcap"),
    pytest.param({"logit_scale": 0.25}, 1.3, True, id="scale"),
    pytest.param({"softcap": 3.0, "logit_scale": 2.0}, PER_TOKEN, True, id="all"),
]


@pytest.mark.parametrize(("options", "temperature", "bias"), OPTIONS)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 10])
def test_float32_agrees_with_the_reference(
    path: str, options: dict[str, float], temperature: float | Tensor, bias: bool, chunk_tokens: int | None
) -> None:
    case = make_case(bias=bias)
    stats = token_stats(
        case.hidden,
        case.head(**options),
        case.targets,
        temperature=temperature,
        want_entropy=True,
        candidate_ids_NK=case.candidates,
        chunk_tokens=chunk_tokens,
    )
    expected, expected_gradients = expect(case, temperature, **options)
    assert stats.entropy is not None
    assert stats.topk_logprobs is not None
    assert stats.topk_ids is not None
    assert torch.equal(stats.topk_ids, case.candidates.int())
    assert relative_error(stats.logprobs, expected.logprobs) < 1e-6
    assert relative_error(stats.entropy, expected.entropy) < 1e-6
    assert relative_error(stats.topk_logprobs, expected.topk_logprobs) < 1e-6
    gradients = torch.autograd.grad(objective(case, stats), case.leaves())
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, expected_gradient) < 1e-6


@pytest.mark.parametrize(("options", "temperature", "bias"), OPTIONS)
def test_float64_agrees_with_the_reference(
    path: str, options: dict[str, float], temperature: float | Tensor, bias: bool
) -> None:
    case = make_case(torch.float64, bias=bias)
    stats = token_stats(
        case.hidden,
        case.head(**options),
        case.targets,
        temperature=temperature,
        want_entropy=True,
        candidate_ids_NK=case.candidates,
    )
    expected, expected_gradients = expect(case, temperature, **options)
    assert relative_error(stats.logprobs, expected.logprobs) < 1e-13
    for gradient, other in zip(
        torch.autograd.grad(objective(case, stats), case.leaves()), expected_gradients, strict=True
    ):
        assert relative_error(gradient, other) < 1e-13


@pytest.mark.parametrize("chunk_tokens", [None, 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_within_its_own_rounding(tiles: None, dtype: torch.dtype, chunk_tokens: int | None) -> None:
    """Against float64 arithmetic on the same half-precision inputs: one rounding of a logit, one of a gradient."""
    unit = torch.finfo(dtype).eps / 2
    case = make_case(dtype, bias=True)
    stats = token_stats(
        case.hidden,
        case.head(),
        case.targets,
        want_entropy=True,
        candidate_ids_NK=case.candidates,
        chunk_tokens=chunk_tokens,
    )
    expected, expected_gradients = expect(case)
    assert stats.logprobs.dtype == torch.float32
    largest_logit = float((case.hidden.double() @ case.weight.double().T).detach().abs().max())
    assert float((stats.logprobs - expected.logprobs).detach().abs().max()) < 2 * unit * largest_logit
    assert relative_error(stats.logprobs, expected.logprobs) < unit
    for gradient, other in zip(
        torch.autograd.grad(objective(case, stats), case.leaves()), expected_gradients, strict=True
    ):
        assert gradient.dtype == dtype
        assert relative_error(gradient, other) < 3 * unit


def test_float32_states_make_a_bfloat16_head_exact(tiles: None) -> None:
    case = make_case(torch.bfloat16)
    case.hidden = case.hidden.detach().float().requires_grad_()
    stats = token_stats(case.hidden, case.head(), case.targets, candidate_ids_NK=case.candidates, want_entropy=True)
    expected, expected_gradients = expect(case)
    assert relative_error(stats.logprobs, expected.logprobs) < 1e-6
    d_hidden, d_weight = torch.autograd.grad(objective(case, stats), case.leaves())
    assert (d_hidden.dtype, d_weight.dtype) == (torch.float32, torch.bfloat16)
    assert relative_error(d_hidden, expected_gradients[0]) < 1e-6
    # the sum over all tokens is rounded once: as near as the dtype can be
    assert relative_error(d_weight, expected_gradients[1]) <= relative_error(
        expected_gradients[1].bfloat16(), expected_gradients[1]
    ) * (1 + 1e-3)


def test_weight_gradient_of_many_token_blocks_is_rounded_once(tiles: None) -> None:
    """Adding 37 blocks in bfloat16 would lose most of it: 1 + 1/256 is 1 there."""
    case = make_case(torch.bfloat16)
    single, many = (
        torch.autograd.grad(
            token_stats(case.hidden, case.head(), case.targets, chunk_tokens=chunk).logprobs.sum(), case.weight
        )[0]
        for chunk in (None, 1)
    )
    assert relative_error(many, single.double()) < 4e-3


def test_states_in_bfloat16_over_a_float32_head_are_promoted(path: str) -> None:
    case = make_case()
    narrow = case.hidden.detach().bfloat16().requires_grad_()
    stats = token_stats(narrow, case.head(), case.targets)
    expected = token_stats(narrow.detach().float(), case.head(), case.targets)
    assert torch.equal(stats.logprobs, expected.logprobs)
    (gradient,) = torch.autograd.grad(stats.logprobs.sum(), narrow)
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("num_tokens", [4, N])
def test_autocast_is_followed(path: str, num_tokens: int) -> None:
    case = make_case(num_tokens=num_tokens)
    with torch.autocast("cpu", torch.bfloat16):
        stats = token_stats(case.hidden, case.head(), case.targets, want_entropy=True)
    halved = Head(case.weight.bfloat16())
    expected = token_stats(case.hidden.bfloat16(), halved, case.targets, want_entropy=True)
    assert torch.equal(stats.logprobs, expected.logprobs)
    gradients = torch.autograd.grad(objective(case, stats), case.leaves())
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32]


def test_top_k_agrees_with_the_reference(path: str) -> None:
    case = make_case()
    stats = token_stats(case.hidden, case.head(), case.targets, top_k=K)
    z = reference.logits(case.hidden.detach().double(), case.weight.detach().double())
    expected = reference.token_stats(z, case.targets, top_k=K)
    assert stats.topk_ids is not None
    assert stats.topk_logprobs is not None
    assert torch.equal(stats.topk_ids.long(), expected.topk_ids)
    assert relative_error(stats.topk_logprobs, expected.topk_logprobs) < 1e-6
    case.candidates = expected.topk_ids
    _, expected_gradients = expect(case)
    gradients = torch.autograd.grad(
        objective(case, TokenStats(stats.logprobs, None, None, stats.topk_logprobs)), case.leaves()
    )
    entropy = torch.autograd.grad(
        objective(case, token_stats(case.hidden, case.head(), case.targets, want_entropy=True), topk=False)
        - objective(case, token_stats(case.hidden, case.head(), case.targets)),
        case.leaves(),
    )
    for gradient, part, other in zip(gradients, entropy, expected_gradients, strict=True):
        assert relative_error(gradient + part, other) < 1e-6


@pytest.mark.parametrize("top_k", [V, V - 1, 300])
def test_top_k_may_be_wider_than_a_tile(tiles: None, top_k: int) -> None:
    case = make_case()
    stats = token_stats(case.hidden, case.head(), case.targets, top_k=top_k)
    z = (case.hidden @ case.weight.T).detach()
    assert stats.topk_ids is not None
    assert torch.equal(z.gather(1, stats.topk_ids.long()), z.topk(top_k, 1).values)


def test_extreme_logits_stay_finite(path: str) -> None:
    hidden = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    weight = torch.linspace(-3e4, 3e4, V)[:, None].requires_grad_()
    stats = token_stats(hidden, Head(weight), torch.tensor([V - 1, V - 1, 0]), want_entropy=True)
    assert stats.entropy is not None
    assert stats.logprobs.tolist() == pytest.approx([0.0, -6e4, -math.log(V)], rel=1e-6)
    assert stats.entropy.tolist() == pytest.approx([0.0, 0.0, math.log(V)], abs=1e-5)
    for gradient in torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), (hidden, weight)):
        assert gradient.isfinite().all()


def test_entropy_of_a_sure_token_is_exact(tiles: None) -> None:
    """Two tokens 20 nats apart, far from 0: the difference of two large numbers would lose it."""
    head = Head(torch.tensor([[100.0], [80.0]]))
    stats = token_stats(torch.ones(1, 1), head, torch.tensor([0]), want_entropy=True)
    assert stats.entropy is not None
    p = math.exp(-20) / (1 + math.exp(-20))
    assert stats.entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log1p(-p), rel=0.1)


def test_a_masked_vocabulary_is_not_nan(path: str) -> None:
    case = make_case(bias=True)
    assert case.bias is not None
    with torch.no_grad():
        case.bias[300:] = -torch.inf
    case.targets = case.targets % 300
    case.targets[0] = 500
    stats = token_stats(case.hidden, case.head(), case.targets, want_entropy=True)
    assert stats.entropy is not None
    assert stats.logprobs[0] == -torch.inf
    expected = token_stats(
        case.hidden[1:], Head(case.weight[:300], case.bias[:300]), case.targets[1:], want_entropy=True
    )
    assert expected.entropy is not None
    torch.testing.assert_close(stats.logprobs[1:], expected.logprobs)
    torch.testing.assert_close(stats.entropy[1:], expected.entropy)
    total = stats.logprobs[1:].sum() + stats.entropy.sum()
    for gradient in torch.autograd.grad(total, (case.hidden, case.weight)):
        assert gradient.isfinite().all()


# What a tile may not change


def test_chunks_change_nothing_that_matters(tiles: None) -> None:
    case = make_case()
    results = [
        token_stats(case.hidden, case.head(), case.targets, want_entropy=True, top_k=K, chunk_tokens=chunk)
        for chunk in (None, 1, 7, N, 1000)
    ]
    for stats in results[1:]:
        assert_same(stats, results[0])


def test_the_sum_follows_a_maximum_that_rises(tiles: None) -> None:
    """Each tile's largest logit is 5 above the last one's, so what was summed before must shrink each time."""
    weight = torch.arange(V, dtype=torch.float32)[:, None] / 256 * 5
    ones = torch.ones(1, 1)
    stats = token_stats(ones, Head(weight), torch.tensor([0]))
    falling = token_stats(ones, Head(weight.flip(0)), torch.tensor([V - 1]))
    expected = weight[0] - weight.double().logsumexp(0)
    torch.testing.assert_close(stats.logprobs.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(falling.logprobs, stats.logprobs, rtol=1e-6, atol=0)


def test_the_vocabulary_takes_several_tiles(tiles: None) -> None:
    tiling = tile_sizes.Tiling.of(N, V, torch.device("cpu"))
    assert [(piece.start, piece.stop) for piece in tiling.vocab_slices()] == [(0, 256), (256, 512), (512, 700)]


def test_tokens_do_not_see_each_other(path: str) -> None:
    case = make_case()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    straight = token_stats(case.hidden, case.head(), case.targets, want_entropy=True)
    shuffled = token_stats(case.hidden[order], case.head(), case.targets[order], want_entropy=True)
    torch.testing.assert_close(shuffled.logprobs, straight.logprobs[order], rtol=1e-6, atol=1e-6)


def test_tokens_without_upstream_gradient_are_left_out(tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(bias=True)
    for upstream in case.upstream:
        upstream[::2] = 0
    _, expected_gradients = expect(case, PER_TOKEN, softcap=4.0)
    stats = token_stats(
        case.hidden,
        case.head(softcap=4.0),
        case.targets,
        temperature=PER_TOKEN,
        want_entropy=True,
        candidate_ids_NK=case.candidates,
    )
    counted: list[int] = []
    real = chunked._backward

    def counting(source: Any, rule: Any, slopes: Any) -> None:
        counted.append(source.tiling.num_tokens)
        real(source, rule, slopes)

    monkeypatch.setattr(chunked, "_backward", counting)
    gradients = torch.autograd.grad(objective(case, stats), case.leaves())
    assert counted == [N // 2]
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert relative_error(gradient, other) < 1e-6


def test_all_upstream_gradients_zero(tiles: None) -> None:
    case = make_case(bias=True)
    stats = token_stats(case.hidden, case.head(), case.targets)
    for gradient in torch.autograd.grad((stats.logprobs * 0).sum(), case.leaves()):
        assert gradient.count_nonzero() == 0


def test_no_tokens(path: str) -> None:
    case = make_case(num_tokens=0)
    stats = token_stats(case.hidden, case.head(), case.targets, want_entropy=True, top_k=K)
    assert stats.logprobs.shape == (0,)
    assert stats.topk_ids is not None
    assert stats.topk_ids.shape == (0, K)
    d_hidden, d_weight = torch.autograd.grad(stats.logprobs.sum(), case.leaves())
    assert d_hidden.shape == (0, D)
    assert d_weight.count_nonzero() == 0


# Which gradients


def test_a_frozen_head_gets_none(path: str) -> None:
    case = make_case(bias=True)
    frozen = Head(case.weight.detach(), None if case.bias is None else case.bias.detach())
    stats = token_stats(case.hidden, frozen, case.targets)
    _, expected_gradients = expect_logprobs(case)
    (gradient,) = torch.autograd.grad(stats.logprobs.sum(), case.hidden)
    assert relative_error(gradient, expected_gradients[0]) < 1e-6


def test_a_frozen_backbone_gets_none(path: str) -> None:
    case = make_case(bias=True)
    stats = token_stats(case.hidden.detach(), case.head(), case.targets)
    _, expected_gradients = expect_logprobs(case)
    for gradient, other in zip(
        torch.autograd.grad(stats.logprobs.sum(), case.leaves()[1:]), expected_gradients[1:], strict=True
    ):
        assert relative_error(gradient, other) < 1e-6


def expect_logprobs(case: Case) -> tuple[Tensor, list[Tensor]]:
    doubles = [x.detach().double().requires_grad_() for x in case.leaves()]
    logprobs = reference.token_stats(reference.logits(*doubles), case.targets, top_k=1).logprobs
    return logprobs, list(torch.autograd.grad(logprobs.sum(), doubles))


def test_nothing_requires_grad(path: str) -> None:
    case = make_case()
    with torch.no_grad():
        stats = token_stats(case.hidden, case.head(), case.targets, want_entropy=True, top_k=K)
    assert not stats.logprobs.requires_grad
    with torch.inference_mode():
        inference = token_stats(case.hidden, case.head(), case.targets, temperature=0.7)
    assert inference.logprobs.shape == (N,)


def test_entropy_without_gradient(path: str) -> None:
    case = make_case()
    stats = token_stats(case.hidden, case.head(), case.targets, want_entropy=True, entropy_grad=False)
    assert stats.entropy is not None
    assert not stats.entropy.requires_grad
    assert stats.logprobs.requires_grad
    expected, _ = expect(case)
    assert relative_error(stats.entropy, expected.entropy) < 1e-6


def test_ids_carry_no_gradient(path: str) -> None:
    case = make_case()
    stats = token_stats(case.hidden, case.head(), case.targets, top_k=K)
    assert stats.topk_ids is not None
    assert not stats.topk_ids.requires_grad


def test_a_tied_head_gets_both_gradients(tiles: None) -> None:
    embedding = nn.Embedding(V, D)
    ids = torch.arange(N)
    stats = token_stats(embedding(ids), Head(embedding.weight), (ids + 1) % V)
    (gradient,) = torch.autograd.grad(stats.logprobs.sum(), embedding.weight)
    weight = embedding.weight.detach().double().requires_grad_()
    z = weight[ids] @ weight.T
    (expected,) = torch.autograd.grad(z.log_softmax(1).gather(1, ((ids + 1) % V)[:, None]).sum(), weight)
    assert relative_error(gradient, expected) < 1e-6


def test_gradcheck(tiles: None) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, dtype=torch.float64, generator=draw).requires_grad_()
    weight = torch.randn(11, 4, dtype=torch.float64, generator=draw).requires_grad_()
    bias = torch.randn(11, dtype=torch.float64, generator=draw).requires_grad_()
    temperature = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    request = Request(
        targets=torch.tensor([0, 5, 10]),
        rule=LogitRule(1.5, 3.0, temperature),
        dtype=torch.float64,
        want_entropy=True,
        entropy_grad=True,
        candidates=torch.tensor([[0, 1], [5, 5], [2, 10]]),
        top_k=0,
        chunk_tokens=2,
    )

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        return [
            result
            for result in head_stats(hidden, weight, bias, request)
            if result is not None and result.is_floating_point()
        ]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_a_second_derivative_is_refused(tiles: None) -> None:
    case = make_case()
    stats = token_stats(case.hidden, case.head(), case.targets)
    (gradient,) = torch.autograd.grad((stats.logprobs**2).sum(), case.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_head_changed_before_the_backward_is_refused(tiles: None) -> None:
    case = make_case()
    stats = token_stats(case.hidden, case.head(), case.targets)
    with torch.no_grad():
        case.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stats.logprobs.sum().backward()


def test_saved_tensors_go_through_hooks(tiles: None) -> None:
    """Offloading of activations must see the hidden states."""
    case = make_case()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stats = token_stats(case.hidden, case.head(), case.targets, temperature=PER_TOKEN)
    assert any(tensor is case.hidden or tensor.shape == (N, D) for tensor in packed)
    stats.logprobs.sum().backward()
    assert case.hidden.grad is not None


@pytest.mark.parametrize("num_tokens", [4, N])
def test_compiled_callers_work(path: str, num_tokens: int) -> None:
    case = make_case(num_tokens=num_tokens)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_stats(hidden * 2, Head(weight), case.targets, temperature=0.7).logprobs.sum() * 3

    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(step, backend="eager")
    actual = torch.autograd.grad(compiled(case.hidden, case.weight), case.leaves())
    expected = torch.autograd.grad(step(case.hidden, case.weight), case.leaves())
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


# The eager path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, PER_TOKEN], ids=["1", "0.7", "a token"])
def test_eager_path_agrees_with_the_reference(path: str, dtype: torch.dtype, temperature: float | Tensor) -> None:
    draw = torch.Generator().manual_seed(0)
    case = make_case()
    logits = (torch.randn(N, V, generator=draw) * 3).to(dtype).requires_grad_()
    before = logits.detach().clone()
    stats = eager_token_stats(
        logits, case.targets, temperature=temperature, want_entropy=True, candidate_ids_NK=case.candidates
    )
    (gradient,) = torch.autograd.grad(objective(case, stats), logits)
    doubles = logits.detach().double().requires_grad_()
    expected = reference.token_stats(doubles, case.targets, temperature=temperature, candidates=case.candidates)
    (expected_gradient,) = torch.autograd.grad(objective(case, expected), doubles)
    bound = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-6}[dtype]
    assert relative_error(stats.logprobs, expected.logprobs) < bound
    assert gradient.dtype == dtype
    assert relative_error(gradient, expected_gradient) < (2e-3 if dtype == torch.bfloat16 else bound)
    assert torch.equal(logits, before)


def test_eager_path_takes_a_view_of_a_custom_function(path: str) -> None:
    class Twin(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    case = make_case()
    raw = (case.hidden @ case.weight.T).detach().requires_grad_()
    view = Twin.apply(raw * 1)  # type: ignore[no-untyped-call]
    (gradient,) = torch.autograd.grad(eager_token_stats(view, case.targets, temperature=0.7).logprobs.sum(), raw)
    (expected,) = torch.autograd.grad(eager_token_stats(raw, case.targets, temperature=0.7).logprobs.sum(), raw)
    torch.testing.assert_close(gradient, expected)


def test_eager_path_masks_by_minus_infinity(path: str) -> None:
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(0))
    logits[:, 300:] = -torch.inf
    logits.requires_grad_()
    targets = torch.arange(N)
    stats = eager_token_stats(logits, targets, want_entropy=True)
    narrow = eager_token_stats(logits[:, :300], targets, want_entropy=True)
    assert_same(stats, narrow)
    assert stats.entropy is not None
    (gradient,) = torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[:, 300:].count_nonzero() == 0


def test_eager_path_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module._say_eager.cache_clear()
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        for _ in range(3):
            eager_token_stats(torch.zeros(1, 2), torch.tensor([0]))
    assert len(caplog.records) == 1
    assert "whole logits" in caplog.text


# Bad input


def _call(**changes: Any) -> TokenStats:
    arguments: dict[str, Any] = {
        "hidden_ND": torch.zeros(3, 2),
        "head": Head(torch.zeros(5, 2)),
        "targets_N": torch.tensor([0, 1, 2]),
    }
    return token_stats(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0: must be finite and above 0. Greedy"),
        ({"temperature": -1}, "temperature=-1: must be finite and above 0"),
        ({"temperature": math.inf}, "temperature=inf: must be finite"),
        ({"temperature": math.nan}, "temperature=nan: must be finite"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, "temperature=0.0: must be finite and above 0"),
        ({"temperature": torch.ones(2)}, "temperature.shape=(2,): must be a scalar or hold one value"),
        ({"top_k": 6}, "top_k=6: must be from 0 to the vocabulary's 5. 0 asks for none"),
        ({"top_k": -1}, "top_k=-1: must be from 0"),
        ({"top_k": 1, "candidate_ids_NK": torch.zeros(3, 1, dtype=torch.long)}, "top_k=1: the candidates are given"),
        ({"candidate_ids_NK": torch.zeros(2, 1, dtype=torch.long)}, "candidate_ids.shape=(2, 1): must be [3, K]"),
        ({"candidate_ids_NK": torch.full((3, 1), 5)}, "candidate_ids=5: must be from 0 to 4"),
        ({"targets_N": torch.tensor([0, 1, 5])}, "targets=5: must be from 0 to 4, the vocabulary. Check"),
        ({"targets_N": torch.tensor([0, -100, 1])}, "targets=-100: must be from 0 to 4"),
        ({"targets_N": torch.tensor([0, 1])}, "targets.shape=(2,): must be [3]"),
        ({"targets_N": torch.zeros(3)}, "targets.dtype=torch.float32: must be an integer type"),
        ({"targets_N": torch.zeros(3, dtype=torch.long, device="meta")}, "targets.device='meta': must be on cpu"),
        ({"head": Head(torch.zeros(5, 2, device="meta"))}, "hidden.device, head.weight.device=('cpu', 'meta')"),
        ({"chunk_tokens": 0}, "chunk_tokens=0: must be at least 1"),
        ({"head": Head(torch.zeros(5, 3))}, "must be [N, D] and [V, D]"),
        ({"head": Head(torch.zeros(5, 2), torch.zeros(4))}, "head.bias.shape=(4,): must be [5]"),
        ({"head": Head(torch.zeros(5, 2), softcap=0.0)}, "head.softcap=0.0: must be finite and above 0"),
        ({"head": Head(torch.zeros(5, 2), logit_scale=-1.0)}, "head.logit_scale=-1.0: must be finite and above 0"),
    ],
)
def test_bad_input_names_value_rule_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        _call(**changes)
    assert message in str(caught.value)


def test_bad_logits_shape() -> None:
    with pytest.raises(DataError, match=r"logits.shape=\(2, 3, 4\): must be \[N, V\]"):
        eager_token_stats(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.long))
