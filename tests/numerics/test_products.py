import pytest
import torch

from ebbtide.numerics import products
from ebbtide.numerics.products import add_product, is_worth_onednn, product_into

HAS_ONEDNN = is_worth_onednn(torch.zeros(1), 1 << 40)


def _factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    # both as views, since gradients come as transposes
    return torch.randn(33, 65, generator=draw).t().to(dtype), torch.randn(70, 33, generator=draw).t().to(dtype)


@pytest.mark.parametrize(
    "onednn", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_ONEDNN, reason="no oneDNN"))]
)
def test_float32_products_agree_with_float64(onednn: bool) -> None:
    a, b = _factors(torch.float32)
    exact = a.double() @ b.double()
    total = torch.full((65, 70), torch.nan)
    add_product(total, a, b, is_first=True, onednn=onednn)
    assert total.isfinite().all()
    assert (total - exact).norm() / exact.norm() < 1e-6
    add_product(total, a, b, is_first=False, onednn=onednn)
    assert (total - 2 * exact).norm() / exact.norm() < 2e-6


@pytest.mark.parametrize("has_narrow", [False, True])
def test_half_precision_is_summed_wide(has_narrow: bool) -> None:
    a, b = _factors(torch.bfloat16)
    exact = a.double() @ b.double()
    out = torch.empty(65, 70)
    narrow = torch.empty(65, 70, dtype=torch.bfloat16) if has_narrow else None
    product_into(out, a, b, narrow=narrow)
    assert (out - exact).abs().max() <= exact.abs().max() * 2**-8
    add_product(out, a, b, is_first=False, onednn=False)
    assert (out - 2 * exact).norm() / exact.norm() < 2**-7


def test_a_sum_in_the_factors_dtype_is_rounded_once() -> None:
    a, b = _factors(torch.bfloat16)
    out = torch.empty(65, 70, dtype=torch.bfloat16)
    add_product(out, a, b, is_first=True, onednn=False)
    exact = a.double() @ b.double()
    assert (out - exact).norm() / exact.norm() < 2**-8


def test_small_products_and_other_dtypes_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    large = 1 << 40
    assert not is_worth_onednn(torch.zeros(1), 1)
    assert not is_worth_onednn(torch.zeros(1, dtype=torch.bfloat16), large)
    assert not is_worth_onednn(torch.zeros(1, dtype=torch.float64), large)
    assert not is_worth_onednn(torch.zeros(1, device="meta"), large)
    monkeypatch.setattr(products, "_MIN_FLOPS", 0)
    assert is_worth_onednn(torch.zeros(1), 0) == HAS_ONEDNN
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not is_worth_onednn(torch.zeros(1), large)
