import pytest

from ebbtide.algorithms.cispo import CISPO
from ebbtide.algorithms.gspo import GSPO
from ebbtide.config import validate
from tests.algorithms.cases import group_of


@pytest.mark.parametrize("plugin", [CISPO, GSPO])
def test_scales_by_hand(plugin: type[CISPO] | type[GSPO]) -> None:
    def judged(scale: str) -> list[float]:
        name = plugin.Config().type
        algorithm = plugin(validate(plugin.Config, {"type": name, "scale": scale}))
        groups = [group_of([4, 0]), group_of([2, 2])]
        return [float(a) for group in algorithm.advantages(groups) for a in group]

    # Group deviations are 2, -2, 0, 0; the group's std is sqrt(8), that of the batch 4, 0, 2, 2 is sqrt(8 / 3).
    assert judged("none") == [2, -2, 0, 0]
    assert judged("group") == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=1e-6)
    assert judged("batch") == pytest.approx([1.5**0.5, -(1.5**0.5), 0, 0], abs=1e-6)


def test_a_batch_of_equal_rewards_is_zero_under_every_scale() -> None:
    for scale in ("none", "group", "batch"):
        algorithm = CISPO(validate(CISPO.Config, {"type": "cispo", "scale": scale}))
        judged = algorithm.advantages([group_of([0.1] * 3), group_of([0.1] * 5)])
        assert not any(a.any() for group in judged for a in group)
