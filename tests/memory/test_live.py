import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from ebbtide.memory.live import LiveStorages


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Bytes must be right without the cycle collector's help."""
    gc.disable()
    yield
    gc.enable()


def test_counts_what_operators_return_until_it_dies() -> None:
    with LiveStorages() as live:
        a = torch.zeros(100)
        b = a + 1
        assert live.current_bytes == 800
        del a
        assert live.current_bytes == 400
        c = torch.cat([b, b])
        assert live.current_bytes == 1200
        del b, c
    assert live.current_bytes == 0
    assert live.peak_bytes == 1200
    assert live.num_created == 3


def test_a_view_adds_nothing_and_keeps_its_base_alive() -> None:
    with LiveStorages() as live:
        a = torch.zeros(64, 64)
        row = a[3].view(8, 8).t()
        a_again = a.detach()
        del a, a_again
        assert live.current_bytes == 64 * 64 * 4
        assert live.num_live == 1
        del row
        assert live.current_bytes == 0


def test_in_place_and_out_add_nothing() -> None:
    with LiveStorages() as live:
        a, b = torch.ones(10), torch.ones(10)
        a.mul_(2).exp_()
        torch.add(a, b, out=b)
        assert live.num_created == 2
        assert live.peak_bytes == 80


def test_older_tensors_and_views_of_them_count_nothing() -> None:
    old = torch.zeros(1000)
    with LiveStorages() as live:
        view = old.view(10, 100).t()
        old.add_(1)
        assert live.current_bytes == 0
        new = view + 1
        assert live.current_bytes == 4000
        del old, view
        assert live.current_bytes == 4000
        del new
        assert live.current_bytes == 0


def test_storages_saved_for_backward_are_seen_in_cpp_hands() -> None:
    x = torch.ones(256, requires_grad=True)
    with LiveStorages() as live:
        y = x.exp().exp()  # autograd keeps both results; Python holds only the second
        loss = y.sum()
        del y
        assert live.current_bytes == 2 * 1024 + 4
        loss.backward()
        assert live.current_bytes == 1024 + 4  # the gradient and the loss
        x.grad = None
        del loss
        assert live.current_bytes == 0


def test_deaths_after_the_mode_are_counted() -> None:
    with LiveStorages() as live:
        a = torch.zeros(5)
    assert live.current_bytes == 20
    del a
    assert live.current_bytes == 0


def test_storages_that_die_in_another_thread_are_counted() -> None:
    with LiveStorages() as live:
        held = [torch.zeros(1000)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join(timeout=30)
        assert live.current_bytes == 0
        assert torch.zeros(1000) is not None
        assert live.peak_bytes == 4000


def test_resize_of_tensor_and_storage() -> None:
    with LiveStorages() as live:
        a = torch.zeros(100)
        a.resize_(200)
        assert live.current_bytes == 800
        a.untyped_storage().resize_(0)
        assert live.current_bytes == 0
        a.untyped_storage().resize_(1200)
        assert (live.current_bytes, live.peak_bytes, live.num_created) == (1200, 1200, 1)
        del a
        assert live.current_bytes == 0


def test_resize_of_an_older_storage_counts_its_growth() -> None:
    old, gathered = torch.zeros(10), torch.zeros(10)
    with LiveStorages() as live:
        old.untyped_storage().resize_(0)
        assert live.current_bytes == 0
        old.untyped_storage().resize_(40)
        assert live.current_bytes == 0
        gathered.untyped_storage().resize_(100)
        assert live.current_bytes == 60
        del gathered
        assert live.current_bytes == 0


def test_resize_is_the_inherited_method_again_after_the_last_mode() -> None:
    with LiveStorages() as outer:
        a = torch.zeros(1)
        with LiveStorages() as inner:
            a.untyped_storage().resize_(8)
            assert (outer.current_bytes, inner.current_bytes) == (8, 4)
        a.untyped_storage().resize_(16)
        assert (outer.current_bytes, inner.current_bytes) == (16, 4)
        assert "resize_" in vars(torch.UntypedStorage)
    assert "resize_" not in vars(torch.UntypedStorage)


def test_nested_modes_count_each_its_own() -> None:
    with LiveStorages() as outer:
        a = torch.zeros(10)
        with LiveStorages() as inner:
            b = torch.zeros(20)
            assert (outer.current_bytes, inner.current_bytes) == (120, 80)
            del a
            assert (outer.current_bytes, inner.current_bytes) == (80, 80)
        c = b + 1
        assert (outer.current_bytes, inner.current_bytes) == (160, 80)
        del b, c
    assert (outer.current_bytes, inner.current_bytes) == (0, 0)


def test_one_mode_may_be_entered_again() -> None:
    live = LiveStorages()
    for _ in range(2):
        with live:
            a = torch.zeros(10)
        assert live.current_bytes == 40
        del a
    assert (live.current_bytes, live.peak_bytes, live.num_created) == (0, 40, 2)


def test_an_error_inside_leaves_nothing_on() -> None:
    live = LiveStorages()
    with pytest.raises(ZeroDivisionError), live:
        raise ZeroDivisionError
    kept = torch.zeros(10)
    assert live.current_bytes == 0
    assert kept.sum() == 0
    assert "resize_" not in vars(torch.UntypedStorage)


def test_peak_can_start_anew() -> None:
    with LiveStorages() as live:
        a = torch.zeros(1000)
        b = torch.zeros(10)
        del a
        live.reset_peak()
        assert live.peak_bytes == 40
        c = b + 1
        assert live.peak_bytes == 80
        del c


def test_torch_tensor_counts_as_new() -> None:
    with LiveStorages() as live:
        a = torch.tensor([1.0, 2.0])
        assert live.current_bytes == 8
        del a
        assert live.current_bytes == 0


def test_live_names_the_operator_and_sorts_by_size() -> None:
    with LiveStorages() as live:
        a = torch.zeros(4)
        b = torch.mm(torch.ones(8, 2), torch.ones(2, 8))
        found = live.live()
    assert [(item.nbytes, item.made_by) for item in found] == [(256, "aten.mm.default"), (16, "aten.zeros.default")]
    assert found[0].storage is b.untyped_storage()
    assert found[1].storage is a.untyped_storage()


def test_track_counts_an_older_tensor_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(10))
    live = LiveStorages()
    live.track([weight, weight.view(2, 5)], "parameter")
    with live:
        view = weight.t()
        assert live.current_bytes == 40
    assert [item.made_by for item in live.live()] == ["parameter"]
    del view, weight
    assert live.current_bytes == 0


def test_track_takes_over_a_tensor_first_seen_as_older() -> None:
    weight = torch.zeros(10)
    with LiveStorages() as live:
        weight.view(2, 5)
        assert live.current_bytes == 0
        live.track([weight], "parameter")
        assert live.current_bytes == 40
        del weight
        assert live.current_bytes == 0


def test_wrapper_subclasses_are_counted_by_what_they_wrap() -> None:
    with LiveStorages() as live:
        both = TwoTensor(torch.zeros(10), torch.zeros(10))
        assert live.current_bytes == 80
        doubled = both * 2
        assert live.current_bytes == 160
        assert isinstance(doubled, TwoTensor)
        del both, doubled
        assert live.current_bytes == 0


def test_sparse_tensors_are_counted_by_their_parts() -> None:
    with LiveStorages() as live:
        indices, values = torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0])
        sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
        total = sparse + sparse
        del indices, values, sparse
        parts = (total._indices(), total._values())
        assert live.current_bytes == sum(part.untyped_storage().nbytes() for part in parts) >= 16 + 8
        del parts
        del total
        assert live.current_bytes == 0


def test_meta_tensors_hold_no_bytes_and_fake_ones_stand_for_theirs() -> None:
    with LiveStorages() as live:
        meta = torch.zeros(10, device="meta")
        assert live.current_bytes == 0
        del meta
    with FakeTensorMode(), LiveStorages() as inside:
        a = torch.zeros(10)
        b = a @ a
        assert inside.current_bytes == 44
        del a, b
        assert inside.current_bytes == 0
    with LiveStorages() as outside, FakeTensorMode():
        c = torch.zeros(10) + 1
        assert outside.current_bytes == 40
        del c
        assert outside.current_bytes == 0


def test_an_address_used_again_is_a_new_storage() -> None:
    with LiveStorages() as live:
        for _ in range(1000):
            a = torch.empty(16)
            del a
        assert (live.num_created, live.peak_bytes, live.current_bytes) == (1000, 64, 0)


def test_a_held_microbatch_graph_is_found() -> None:
    """The leak that the tool exists for: an output kept with its graph keeps every saved tensor."""
    weight = torch.ones(64, 64, requires_grad=True)

    def run(detach: bool) -> int:
        kept: list[Tensor] = []
        with LiveStorages() as live:
            for _ in range(4):
                entropy = (torch.ones(64, 64) @ weight).exp().exp().sum()
                kept.append(entropy.detach() if detach else entropy)
            del entropy
            return live.current_bytes

    assert run(detach=True) == 4 * 4
    assert run(detach=False) == 4 * (3 * 64 * 64 * 4 + 4)
