import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.errors import DataError
from ebbtide.memory.live import LiveStorages
from ebbtide.numerics.temperature import is_readable, read_temperature, scale_logits


@pytest.mark.parametrize(
    "one", [1, 1.0, torch.tensor(1.0), torch.ones(1), torch.ones(3), torch.ones(3, 1), torch.tensor(1)]
)
def test_one_is_nothing(one: float | Tensor) -> None:
    assert read_temperature(one, 3) is None


@pytest.mark.parametrize(
    "value", [0.7, torch.tensor(0.7, dtype=torch.float64), torch.full((3,), 0.7, dtype=torch.float64)]
)
def test_one_value_for_all_becomes_a_host_scalar(value: float | Tensor) -> None:
    read = read_temperature(value, 3, torch.float64)
    assert isinstance(read, float)
    assert read == 0.7


def test_a_value_a_token_stays_a_tensor() -> None:
    read = read_temperature(torch.tensor([1, 2, 1]), 3)
    assert isinstance(read, Tensor)
    assert read.dtype == torch.float32
    assert read.tolist() == [1.0, 2.0, 1.0]


def test_a_tensor_that_cannot_be_read_is_taken_as_it_is() -> None:
    with FakeTensorMode():
        ones = torch.ones(3)
        assert not is_readable(ones)
        assert isinstance(read_temperature(ones, 3), Tensor)
        scalar = read_temperature(torch.ones(()), 3)
        assert isinstance(scalar, Tensor)
        assert scalar.shape == (3,)
    assert not is_readable(torch.ones(3, device="meta"))
    assert is_readable(torch.nn.Parameter(torch.ones(3)))


def test_no_tokens_need_no_temperature() -> None:
    assert read_temperature(torch.ones(0), 0) is None


@pytest.mark.parametrize("value", [0, 0.0, -0.5, math.inf, math.nan, torch.tensor(0.0), torch.tensor([1.0, -1.0, 1.0])])
def test_not_above_zero_is_refused(value: float | Tensor) -> None:
    with pytest.raises(
        DataError, match=r"temperature=.*: must be finite and above 0. Greedy decoding has no log-probs"
    ):
        read_temperature(value, 3)


def test_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match=r"temperature.shape=\(2,\): must be a scalar or hold one value for each of 3"):
        read_temperature(torch.ones(2), 3)


def test_one_is_no_allocation() -> None:
    logits = torch.randn(4, 100)
    with LiveStorages() as live:
        temperature = read_temperature(1.0, 4)
        assert scale_logits(logits, temperature) is logits
    assert (live.num_created, live.peak_bytes) == (0, 0)


@pytest.mark.parametrize("temperature", [0.5, torch.tensor([0.5, 1.0, 2.0, 4.0])])
def test_scaling_in_place_allocates_nothing_for_the_logits(temperature: float | Tensor) -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    logits = hidden @ weight.T
    divisor = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    expected = logits.detach() / divisor
    with LiveStorages() as live:
        scaled = scale_logits(logits, temperature)
    assert live.peak_bytes < logits.nbytes
    assert scaled is logits
    assert torch.equal(scaled, expected)
    (gradient,) = torch.autograd.grad(scaled.sum(), hidden)
    (expected_gradient,) = torch.autograd.grad(((hidden @ weight.T) / divisor).sum(), hidden)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_plain_view_is_scaled_in_place() -> None:
    hidden, weight = torch.randn(1, 4, 8, requires_grad=True), torch.randn(100, 8)
    whole = hidden @ weight.T
    logits = whole[0]
    assert scale_logits(logits, 2.0).data_ptr() == whole.data_ptr()
    (gradient,) = torch.autograd.grad(logits.sum(), hidden)
    torch.testing.assert_close(gradient[0], weight.sum(0).expand(4, 8) / 2)


def test_a_view_of_a_custom_function_is_scaled_out_of_place() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    raw = torch.ones(2, 3, requires_grad=True)
    logits = Same.apply(raw * 1)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="view"):
        logits.div_(2.0)
    scaled = scale_logits(logits, 2.0)
    assert scaled is not logits
    assert scaled.tolist() == [[0.5] * 3] * 2
    assert logits.tolist() == [[1.0] * 3] * 2
    scaled.sum().backward()
    assert raw.grad is not None
    assert raw.grad.tolist() == [[0.5] * 3] * 2


@pytest.mark.parametrize("of_base", [False, True])
def test_a_hook_is_not_dropped(of_base: bool) -> None:
    """As FSDP2's, which gathers parameters when the gradient reaches what its module returned."""
    raw = torch.ones(1, 2, 3, requires_grad=True)
    returned = raw * 1
    view = returned.view(2, 3)
    seen: list[Tensor] = []
    (returned if of_base else view).register_hook(seen.append)
    scaled = scale_logits(view, 2.0)
    assert scaled is not view
    scaled.sum().backward()
    assert len(seen) == 1
    assert raw.grad is not None
    assert raw.grad.flatten().tolist() == [0.5] * 6


def test_a_leaf_is_scaled_out_of_place() -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    assert scale_logits(leaf, 2.0) is not leaf
    assert scale_logits(leaf.view(6), 2.0).tolist() == [0.5] * 6
    assert leaf.tolist() == [[1.0] * 3] * 2


def test_a_tensor_saved_for_backward_is_refused_not_corrupted() -> None:
    """tanh differentiates by its own output: once that is changed its gradient would be wrong, so autograd raises."""
    raw = torch.ones(2, 3, requires_grad=True)
    scaled = scale_logits(torch.tanh(raw), 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.sum().backward()


def test_without_gradient_everything_is_scaled_in_place() -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        assert scale_logits(leaf, 2.0) is leaf
    with torch.inference_mode():
        inference = torch.ones(2, 3)
        assert scale_logits(inference, 2.0) is inference
    assert scale_logits(inference, 2.0).tolist() == [[0.25] * 3] * 2


def test_half_precision_keeps_its_dtype() -> None:
    logits = torch.ones(2, 3, dtype=torch.bfloat16)
    assert scale_logits(logits, torch.tensor([2.0, 4.0])).dtype == torch.bfloat16
