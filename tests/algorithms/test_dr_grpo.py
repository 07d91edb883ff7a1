import math

import pytest

from ebbtide.algorithms.dr_grpo import DrGRPO
from ebbtide.config import validate
from ebbtide.errors import ConfigError
from tests.algorithms.cases import assert_matches, batch_of, group_of, inputs_of, logprobs_of
from tests.reference.algorithms import clipped_loss, group_advantages


def algorithm(**settings: object) -> DrGRPO:
    return DrGRPO(validate(DrGRPO.Config, {"type": "dr_grpo", **settings}))


def test_advantages_are_deviations() -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0], [4.0, 1.0, 1.0]]
    found = algorithm().advantages([group_of(group) for group in rewards])
    assert [[float(a) for a in group] for group in found] == [[0.5, -0.5, -0.5, 0.5], [2, -1, -1]]
    assert group_advantages(rewards, 0.0, divide=False) == [[0.5, -0.5, -0.5, 0.5], [2, -1, -1]]


def test_loss_by_hand() -> None:
    # Terms -1.1, -1.1 and +0.9: the sum -1.3 over 2 sequences x 4 tokens, however long the sequences are.
    batch = batch_of([[-1.0, -1.0], [-2.0]], advantages=[1.0, -1.0])
    logprobs = logprobs_of(batch, [-1 + math.log(1.1), -1 + math.log(1.1), -2 + math.log(0.9)])
    loss, _ = algorithm().loss(inputs_of(batch, logprobs, max_tokens=4))
    assert loss.item() == pytest.approx(-1.3 / 8)


def test_matches_the_reference() -> None:
    assert_matches(algorithm(), clipped_loss(0.2, 0.2), "constant")


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scale_eps=0.1: has no effect with scale='none'"):
        algorithm(scale_eps=0.1)
