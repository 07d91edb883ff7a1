import pytest

from ebbtide.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from ebbtide.config import validate
from tests.algorithms.cases import assert_matches, batch_of, group_of
from tests.reference.algorithms import clipped_loss, standardized


def algorithm(**settings: object) -> ReinforcePPBaseline:
    return ReinforcePPBaseline(validate(ReinforcePPBaseline.Config, {"type": "reinforce_pp_baseline", **settings}))


def test_advantages_by_hand() -> None:
    groups = [group_of([4, 0], lengths=[1, 1], index=0), group_of([1, 1], lengths=[1, 1], index=1)]
    deviations = [float(a) for group in algorithm().advantages(groups) for a in group]
    assert deviations == [2, -2, 0, 0]
    # Four tokens 2, -2, 0, 0: mean 0, variance 8 / 3.
    batch = batch_of([[-1.0]] * 4, deviations, group_ids=[0, 0, 1, 1], rewards=[4.0, 0.0, 1.0, 1.0])
    prepared, _ = algorithm().prepare(batch, batch.counts(4))
    scaled = 2 / (8 / 3) ** 0.5
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([scaled, -scaled, 0, 0])


def test_tokens_are_standardized_not_sequences() -> None:
    batch = batch_of([[-1.0] * 3, [-1.0]], [1.0, -1.0])
    prepared, _ = algorithm().prepare(batch, batch.counts(4))
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx(standardized([1, 1, 1, -1]))


def test_loss_matches_the_reference() -> None:
    assert_matches(algorithm(), clipped_loss(0.2, 0.2), "token_mean")
