"""The same numbers and the same bound on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ebbtide.memory.live import LiveStorages
from ebbtide.numerics.logprobs import Head, eager_token_stats, token_stats
from ebbtide.numerics.tiles import Tiling
from tests.reference import token_stats as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N, V, D, K = 300, 40_000, 64, 4


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=draw).to("cuda", dtype).requires_grad_()
    weight = (torch.randn(V, D, generator=draw) * 0.3).to("cuda", dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=draw).cuda(), torch.randn(N, generator=draw).cuda()


@pytest.mark.parametrize(
    ("dtype", "of_values", "of_gradients"), [(torch.float32, 1e-6, 1e-5), (torch.bfloat16, 1e-5, 1e-2)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_agrees_with_float64(dtype: torch.dtype, of_values: float, of_gradients: float, temperature: float) -> None:
    """Products of bfloat16 come back in float32, so values are as good as float32's."""
    hidden, weight, targets, upstream = _inputs(dtype)
    stats = token_stats(hidden, Head(weight), targets, temperature=temperature, want_entropy=True, chunk_tokens=128)
    assert stats.entropy is not None
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = reference.token_stats(reference.logits(*doubles), targets, temperature=temperature, top_k=K)
    assert (stats.logprobs - expected.logprobs).norm() < of_values * expected.logprobs.norm()
    assert (stats.entropy - expected.entropy).norm() < of_values * expected.entropy.norm()
    gradients = torch.autograd.grad((stats.logprobs + stats.entropy) @ upstream, (hidden, weight))
    others = torch.autograd.grad((expected.logprobs + expected.entropy) @ upstream.double(), doubles)
    for gradient, other in zip(gradients, others, strict=True):
        assert gradient.dtype == dtype
        assert (gradient - other).norm() < of_gradients * other.norm()


def test_top_k_and_candidates() -> None:
    hidden, weight, targets, _ = _inputs(torch.float32)
    stats = token_stats(hidden, Head(weight), targets, top_k=K)
    assert stats.topk_ids is not None
    assert stats.topk_logprobs is not None
    again = token_stats(hidden, Head(weight), targets, candidate_ids_NK=stats.topk_ids)
    torch.testing.assert_close(again.topk_logprobs, stats.topk_logprobs)
    eager = eager_token_stats(hidden @ weight.T, targets, top_k=K)
    torch.testing.assert_close(eager.topk_logprobs, stats.topk_logprobs)


def test_no_value_is_waited_for() -> None:
    """The host runs ahead of the device through forward and backward."""
    hidden, weight, targets, upstream = _inputs(torch.bfloat16)
    temperature = torch.full((N,), 0.7, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = token_stats(hidden, Head(weight), targets, temperature=temperature, want_entropy=True, top_k=K)
        torch.autograd.grad(stats.logprobs @ upstream, (hidden, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_peak_is_tiles_and_gradients() -> None:
    hidden, weight, targets, upstream = _inputs(torch.bfloat16)
    tiling = Tiling.of(N, V, hidden.device)
    tile = tiling.tokens * tiling.vocab
    with LiveStorages() as live:
        stats = token_stats(hidden, Head(weight), targets, temperature=0.7)
        torch.autograd.grad(stats.logprobs @ upstream, (hidden, weight))
    slices = 3 * 4 * tiling.vocab * D
    assert live.peak_bytes <= (4 + 2) * tile + weight.nbytes + 3 * 4 * N * D + slices + 64 * N


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_callers_work(backend: str) -> None:
    hidden, weight, targets, _ = _inputs(torch.bfloat16)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_stats(hidden * 2, Head(weight), targets).logprobs.sum() * 3

    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(step, backend=backend)
    for one, other in zip(
        torch.autograd.grad(compiled(hidden, weight), (hidden, weight)),
        torch.autograd.grad(step(hidden, weight), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
