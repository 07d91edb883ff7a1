"""Axes over ranks, and what ranks say to one another along them."""

import pytest
import torch
import torch.distributed as dist

from ebbtide.device import Device
from ebbtide.engines.mesh import Axes, Ranks
from ebbtide.errors import ConfigError
from tests.multiprocess import forked

CPU = Device("cpu")


@pytest.mark.parametrize(
    ("world", "given", "expected"),
    [
        (1, {}, Axes(1, 1, 1, 1)),
        (8, {}, Axes(1, 1, 8, 1)),
        (8, {"tp": 2}, Axes(1, 1, 4, 2)),
        (8, {"pp": 2, "dp_replicate": 2, "tp": 2}, Axes(2, 2, 1, 2)),
    ],
)
def test_ranks_that_no_axis_takes_shard(world: int, given: dict[str, int], expected: Axes) -> None:
    assert Axes.over(world, **given) == expected


def test_axes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pp=1, dp_replicate=1, tp=3=3: their product must divide .* 8"):
        Axes.over(8, tp=3)


def test_one_rank_has_nobody_to_ask() -> None:
    ranks = Ranks(CPU, Axes(), needs_mesh=False)
    assert ranks.mesh is None
    assert ranks.world_size() == 1
    assert ranks.total([3, 4], "dp_shard", "pp") == [3, 4]
    assert ranks.gather("a", "pp") == ["a"]
    assert ranks.index("tp") == 0
    assert not dist.is_initialized()
    ranks.close()


def test_a_group_of_one_is_made_where_a_mesh_is_needed_and_ends_with_it() -> None:
    ranks = Ranks(CPU, Axes(), needs_mesh=True)
    assert ranks.mesh is not None
    assert dist.get_world_size() == 1
    ranks.close()
    ranks.close()
    assert not dist.is_initialized()


def test_four_ranks_along_two_axes() -> None:
    """Ranks 0 1 2 3 stand at (pp, tp) = (0, 0), (0, 1), (1, 0), (1, 1)."""

    def fn(rank: int) -> tuple[int, int, list[int], list[int], list[int], list[str], list[float]]:
        ranks = Ranks(CPU, Axes(pp=2, tp=2), needs_mesh=True)
        shared = ranks.share(torch.full((2,), float(rank)), "pp", 1)
        return (
            ranks.index("pp"),
            ranks.index("tp"),
            ranks.total([rank], "pp"),
            ranks.total([rank], "pp", "tp"),
            ranks.total([rank], "tp", op=dist.ReduceOp.MAX),
            ranks.gather(str(rank), "tp"),
            shared.tolist(),
        )

    assert forked(fn, 4) == [
        (0, 0, [2], [6], [1], ["0", "1"], [2.0, 2.0]),
        (0, 1, [4], [6], [1], ["0", "1"], [3.0, 3.0]),
        (1, 0, [2], [6], [3], ["2", "3"], [2.0, 2.0]),
        (1, 1, [4], [6], [3], ["2", "3"], [3.0, 3.0]),
    ]
