import pytest

from ebbtide.algorithms.gpg import GPG
from ebbtide.config import validate
from tests.algorithms.cases import assert_matches, batch_of, group_of, inputs_of, logprobs_of
from tests.reference.algorithms import gpg_advantages, policy_gradient_loss


def algorithm(**settings: object) -> GPG:
    return GPG(validate(GPG.Config, {"type": "gpg", **settings}))


def test_advantages_by_hand() -> None:
    # Two of four completions are in a group with contrast: deviations are doubled.
    rewards = [[1.0, 0.0], [1.0, 1.0]]
    found = algorithm().advantages([group_of(group) for group in rewards])
    assert [[float(a) for a in group] for group in found] == [[1, -1], [0, 0]] == gpg_advantages(rewards)


def test_no_contrast_at_all_is_zero() -> None:
    found = algorithm().advantages([group_of([0.1] * 7), group_of([0.3] * 3)])
    assert not any(float(a) for group in found for a in group)


def test_loss_by_hand() -> None:
    batch = batch_of([[-1.0, -1.0], [-2.0]], advantages=[1.0, -2.0])
    loss, _ = algorithm().loss(inputs_of(batch, logprobs_of(batch, [-1.0, -3.0, -2.0])))
    assert loss.item() == pytest.approx((1 + 3 - 4) / 3)


def test_matches_the_reference() -> None:
    assert_matches(algorithm(), policy_gradient_loss, "token_mean")
