"""FSDP2 over a policy: what is gathered, how much, and what the forward sees."""

import time

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ebbtide.device import Device
from ebbtide.engines.base import seal
from ebbtide.engines.mesh import Axes, Ranks
from ebbtide.engines.sharding import WeightsInForward, fsdp_modules, gathered, num_shards, shard
from ebbtide.memory.live import LiveStorages
from tests.multiprocess import forked

CPU = Device("cpu")


class Toy(nn.Module):
    """Two layers, and a weight that is used without its module being called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.head.weight) * 1


def test_gradients_are_summed_and_not_averaged() -> None:
    def fn(_: int) -> tuple[list[int], list[list[float]]]:
        ranks = Ranks(CPU, Axes(dp_shard=2), needs_mesh=True)
        toy = Toy()
        assert ranks.mesh is not None
        shard(toy, list(toy.layers), ranks.mesh["dp_shard"], torch.float32, reshard=True)
        toy(torch.ones(1, 4)).sum().backward()
        shards = [num_shards(weight) for weight in toy.parameters()]
        return shards, [gathered(weight.grad, CPU.torch).flatten().tolist() for weight in toy.parameters()]  # type: ignore[arg-type]

    alone = Toy()
    alone(torch.ones(1, 4)).sum().backward()
    for shards, gradients in forked(fn, 2):
        assert shards == [2, 2, 2]
        for gradient, weight in zip(gradients, alone.parameters(), strict=True):
            assert weight.grad is not None
            torch.testing.assert_close(torch.tensor(gradient), 2 * weight.grad.flatten())


def test_a_weight_that_is_whole_is_given_as_it_is() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert num_shards(weight) == 1
    found = gathered(weight, CPU.torch)
    assert found.data_ptr() == weight.data_ptr()
    assert not found.requires_grad


def test_gathering_owns_what_it_gives_and_leaves_nothing() -> None:
    def fn(_: int) -> tuple[bool, int, int]:
        ranks = Ranks(CPU, Axes(dp_shard=2), needs_mesh=True)
        toy = Toy()
        original = toy.head.weight.detach().clone()
        assert ranks.mesh is not None
        shard(toy, list(toy.layers), ranks.mesh["dp_shard"], torch.float32, reshard=True)
        with LiveStorages() as live:
            whole = gathered(toy.head.weight, CPU.torch)
        is_equal, size = torch.equal(whole, original), whole.untyped_storage().nbytes()
        del whole
        deadline = time.monotonic() + 5.0  # gloo's threads let go of what they moved a little later
        while live.current_bytes > 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        return is_equal, size, live.current_bytes

    assert all(is_equal and left <= 0 for is_equal, _, left in forked(fn, 2))


def test_a_divided_tensor_is_sealed() -> None:
    def fn(_: int) -> tuple[bool, bool, bool]:
        ranks = Ranks(CPU, Axes(dp_shard=2), needs_mesh=True)
        assert ranks.mesh is not None
        live = distribute_tensor(torch.ones(4, requires_grad=True), ranks.mesh["dp_shard"], [Shard(0)]) * 2
        sealed = seal({"a": [live]})["a"][0]
        return isinstance(sealed, DTensor), sealed.requires_grad, live.requires_grad

    assert forked(fn, 2) == [(True, False, True)] * 2


def test_the_forward_is_watched_until_the_watch_closes() -> None:
    """The gathered weights, which are other tensors than the shards; the head's too."""

    def fn(_: int) -> tuple[list[str], bool, bool, int]:
        ranks = Ranks(CPU, Axes(dp_shard=2), needs_mesh=True)
        toy = Toy()
        assert ranks.mesh is not None
        shard(toy, list(toy.layers), ranks.mesh["dp_shard"], torch.float32, reshard=True)
        watch = WeightsInForward(toy)
        result = toy(torch.ones(1, 4))
        seen = dict(watch.trained())
        differ = all(seen[name] is not weight for name, weight in toy.named_parameters())
        variables = set()
        pending = [result.grad_fn]
        while pending:
            node = pending.pop()
            if node is not None:
                variables.add(id(getattr(node, "variable", None)))
                pending += [following for following, _ in node.next_functions]
        reached = all(id(weight) in variables for weight in seen.values())
        result.sum().backward()
        watch.close()
        return list(seen), differ, reached, len(watch.by_name)

    for names, _, reached, left in forked(fn, 2):
        assert names == ["layers.0.weight", "layers.1.weight", "head.weight"]
        assert reached
        assert left == 0


def test_layers_and_the_rest_are_sharded_apart() -> None:
    ranks = Ranks(CPU, Axes(), needs_mesh=True)
    try:
        toy = Toy()
        assert ranks.mesh is not None
        shard(toy, list(toy.layers), ranks.mesh["dp_shard"], torch.bfloat16, reshard=False)
        assert fsdp_modules(toy) == [toy, *toy.layers]
        assert all(isinstance(layer, FSDPModule) for layer in toy.layers)
        assert toy(torch.ones(1, 4)).dtype == torch.bfloat16
        assert {weight.dtype for weight in toy.parameters()} == {torch.bfloat16}, "gathered until the backward"
        for module in fsdp_modules(toy):
            module.reshard()
        assert {weight.dtype for weight in toy.parameters()} == {torch.float32}
    finally:
        ranks.close()
