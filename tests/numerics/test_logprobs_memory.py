"""Peak bytes of the log-probs, to the byte."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.memory.live import LiveStorages
from ebbtide.numerics import chunked, logprobs, products, sources
from ebbtide.numerics.logprobs import Head, eager_token_stats, token_stats
from ebbtide.numerics.products import is_worth_onednn
from ebbtide.numerics.tiles import Tiling

HAS_ONEDNN = is_worth_onednn(torch.zeros(1), 1 << 40)


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles, whatever the size."""
    monkeypatch.setattr(logprobs, "_SMALL", 0)


class Measured:
    """Bytes of one forward and backward, beyond its inputs, and the storages that were made."""

    def __init__(self, N: int, V: int, D: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        hidden = torch.zeros(N, D, dtype=dtype, requires_grad=True)
        weight = torch.zeros(V, D, dtype=dtype, requires_grad=True)
        targets, upstream = torch.zeros(N, dtype=torch.long), torch.ones(N)
        with LiveStorages() as live:
            stats = token_stats(hidden, Head(weight), targets, **options)
            self.forward_peak, self.kept = live.peak_bytes, live.current_bytes
            live.reset_peak()
            gradients = torch.autograd.grad(stats.logprobs, (hidden, weight), upstream)
            self.backward_peak = live.peak_bytes - self.kept
            self.num_created = live.num_created
        self.tile = tile_bytes(N, V)
        self.gradients = sum(gradient.nbytes for gradient in gradients)
        del stats, gradients
        assert live.current_bytes == 0

    def figures(self) -> tuple[int, int, int, int]:
        return self.forward_peak, self.kept, self.backward_peak, self.num_created


def tile_bytes(N: int, V: int) -> int:
    tiling = Tiling.of(N, V, torch.device("cpu"))
    return 4 * tiling.tokens * tiling.vocab


def expect_exactly(measured: Measured, N: int, V: int, D: int, onednn: bool) -> None:
    """What lives at the peaks, in bytes a token: 4 for a float, 8 for an id, 1 for a mark.

    Forward: a tile, and the larger of two moments. In a tile: running maximum and sum and the picked logit of all
    tokens; of the tile's own five temporaries. At the end: maximum, sum, its log, the normaliser, the picked logit, the
    log-prob, and the mark of a masked one. Without oneDNN the tile is still held at the end, with it only until then.
    Kept: normaliser and log-prob. Backward: the gradients, a tile, two slopes of all tokens; and ids, marks and slopes
    of the tile's own, or what oneDNN returns to be added to a gradient.
    """
    tiling = Tiling.of(N, V, torch.device("cpu"))
    tile, rows = measured.tile, tiling.tokens
    in_a_tile, at_the_end = tile + 12 * N + 20 * rows, 21 * N + (0 if onednn else tile)
    assert measured.forward_peak == max(in_a_tile, at_the_end)
    assert measured.kept == 8 * N
    returned = 4 * D * max(rows, tiling.vocab) if onednn else 0
    assert measured.backward_peak == measured.gradients + tile + 8 * N + max(13 * rows, returned)


@pytest.mark.timeout(600)
def test_the_bound_holds_to_the_byte_at_full_size_at_any_temperature() -> None:
    """Whole logits would take 4.98 GB in float32; here it is a tile of 8 MiB."""
    N, V = 8192, 151_936
    at_one = Measured(N, V, 8)
    expect_exactly(at_one, N, V, 8, onednn=HAS_ONEDNN)
    assert at_one.forward_peak < 8.6e6 < 4 * N * V / 500
    assert Measured(N, V, 8, temperature=0.7).figures() == at_one.figures()


@pytest.mark.parametrize(
    "onednn", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_ONEDNN, reason="no oneDNN"))]
)
@pytest.mark.parametrize("N", [1, 300, 2048])
def test_the_bound_holds_for_either_product(onednn: bool, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_MIN_FLOPS", 0)
    monkeypatch.setattr(sources, "is_worth_onednn", lambda like, num_flops: onednn)
    V = 700_000 // min(N, 256)
    measured = Measured(N, V, 4)
    expect_exactly(measured, N, V, 4, onednn)


def test_a_temperature_of_one_makes_no_storage_however_it_is_said() -> None:
    N, V = 512, 2000
    plain = Measured(N, V, 4)
    assert Measured(N, V, 4, temperature=1).figures() == plain.figures()
    assert Measured(N, V, 4, temperature=0.7).figures() == plain.figures()
    ones = Measured(N, V, 4, temperature=torch.ones(N))
    read = 2 + 2  # the reading makes four values of 4 bytes: least, greatest, and each as a host scalar
    assert ones.figures()[:3] == plain.figures()[:3]
    assert ones.num_created <= plain.num_created + read


@pytest.mark.parametrize(
    ("options", "tiles", "per_token"),
    [
        pytest.param({"want_entropy": True}, 2, 64, id="entropy"),
        pytest.param({"top_k": 8}, 1, 64 + 40 * 8, id="top-k"),
        pytest.param({"candidate_ids_NK": torch.zeros(4096, 8, dtype=torch.long)}, 1, 64 + 40 * 8, id="candidates"),
        pytest.param({"temperature": torch.linspace(0.5, 1, 4096)}, 1, 64, id="temperature a token"),
    ],
)
def test_the_peak_does_not_grow_with_the_vocabulary(options: dict[str, Any], tiles: int, per_token: int) -> None:
    N = 4096
    for V in (8192, 20_000):
        measured = Measured(N, V, 8, **options)
        assert measured.forward_peak <= tiles * measured.tile + per_token * N
        assert measured.backward_peak <= tiles * measured.tile + per_token * N + measured.gradients


@pytest.mark.parametrize("N", [1024, 4096])
def test_a_bfloat16_weight_has_no_second_gradient_in_float32(N: int) -> None:
    """At most one slice of it; the hidden states' gradient is summed in float32, which is two more of it."""
    V, D = 20_000, 64
    measured = Measured(N, V, D, torch.bfloat16)
    slice_bytes = 4 * D * Tiling.of(N, V, torch.device("cpu")).vocab
    others = 4 * N * D + 2 * slice_bytes + 64 * N
    assert measured.backward_peak <= 2 * measured.tile + measured.gradients + others
    assert others < 4 * V * D


def test_fake_tensors_take_as_many_bytes() -> None:
    """So a plan of memory may run this code without computing anything."""
    real = Measured(2048, 5000, 8, want_entropy=True, top_k=4)
    with FakeTensorMode():
        fake = Measured(2048, 5000, 8, want_entropy=True, top_k=4)
    assert fake.figures()[:3] == real.figures()[:3]


def test_the_eager_path_adds_its_gradient_and_tiles_only() -> None:
    N, V = 2048, 5000
    logits = torch.zeros(N, V, requires_grad=True)
    for temperature in (1.0, 0.7):
        with LiveStorages() as live:
            stats = eager_token_stats(logits, torch.zeros(N, dtype=torch.long), temperature=temperature)
            assert live.peak_bytes <= tile_bytes(N, V) + 64 * N
            (gradient,) = torch.autograd.grad(stats.logprobs.sum(), logits)
            assert live.peak_bytes <= logits.nbytes + tile_bytes(N, V) + 64 * N
            del gradient, stats


def test_the_fault_put_back_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaling out of place, as `logits / temperature` does, is seen at once."""
    real = chunked._RunningSoftmax.take_

    def out_of_place(self: Any, z: Tensor, rows: slice, spare: Tensor | None) -> None:
        real(self, z / 1.0, rows, spare)

    N, V = 2048, 4096
    honest = Measured(N, V, 4)
    monkeypatch.setattr(chunked._RunningSoftmax, "take_", out_of_place)
    assert Measured(N, V, 4).forward_peak >= honest.forward_peak + honest.tile - 64 * N
