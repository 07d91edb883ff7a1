import math
from dataclasses import replace

import pytest
import torch

from ebbtide.algorithms.dapo import DAPO
from ebbtide.config import validate
from ebbtide.errors import ConfigError
from tests.algorithms.cases import assert_matches, batch_of, group_of, inputs_of, logprobs_of
from tests.reference.algorithms import clipped_loss, group_advantages


def algorithm(**settings: object) -> DAPO:
    return DAPO(validate(DAPO.Config, {"type": "dapo", **settings}))


def test_the_upper_bound_is_higher() -> None:
    # Ratio 1.25 lies under 1.28, ratio 1.5 does not: -(1.25 + 1.28) / 2.
    batch = batch_of([[-1.0], [-1.0]], advantages=[1.0, 1.0])
    loss, _ = algorithm().loss(inputs_of(batch, logprobs_of(batch, [-1 + math.log(1.25), -1 + math.log(1.5)])))
    assert loss.item() == pytest.approx(-1.265)


def test_matches_the_reference() -> None:
    assert_matches(algorithm(), clipped_loss(0.2, 0.28), "token_mean")


def test_groups_without_contrast_are_dropped_and_refilled() -> None:
    dapo = algorithm(max_refills=5)
    assert dapo.max_refills == 5
    assert [dapo.keep(group_of(rewards)) for rewards in ([1, 1, 1], [0, 0, 0], [0.5, 0.5, 0.5], [0, 0, 1])] == [
        False,
        False,
        False,
        True,
    ]


def test_overlong_completions_pay_by_hand() -> None:
    # Limit 8, buffer 4: lengths 4, 6 and 8 pay 0, 1/2 and 1. Rewards 1, 1, 1 become 1, 1/2, 0: mean 1/2, std 1/2.
    batch = batch_of([[-1.0] * 4, [-1.0] * 6, [-1.0] * 8], [0.0] * 3, group_ids=[0, 0, 0], rewards=[1.0, 1.0, 1.0])
    prepared, _ = algorithm(overlong_buffer_tokens=4, scale_eps=1e-12).prepare(batch, batch.counts(8))
    for b, expected in enumerate((1.0, 0.0, -1.0)):
        assert prepared.advantages[prepared.loss_mask & (prepared.sequence_ids == b)].tolist() == pytest.approx(
            [expected] * (4, 6, 8)[b]
        )
    assert not prepared.advantages[~prepared.loss_mask].any()


def test_overlong_penalty_scales_and_stops_at_the_limit() -> None:
    lengths = (9, 7, 2)
    batch = batch_of([[-1.0] * length for length in lengths], [0.0] * 3, group_ids=[0, 0, 0], rewards=[1.0, 0.0, 3.0])
    prepared, _ = algorithm(overlong_buffer_tokens=2, overlong_penalty=0.5).prepare(batch, batch.counts(8))
    expected = group_advantages([[1.0 - 0.5, 0.0 - 0.25, 3.0]], 1e-6)[0]
    found = [float(prepared.advantages[prepared.sequence_ids == b].sum()) / lengths[b] for b in range(3)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    batch = batch_of([[-1.0]], [0.0])
    with pytest.raises(ConfigError, match=r"overlong_buffer_tokens=9: must not exceed sampling.max_tokens=8"):
        algorithm(overlong_buffer_tokens=9).prepare(batch, batch.counts(8))


def test_without_a_buffer_advantages_stay() -> None:
    batch = replace(batch_of([[-1.0]], [0.5]), rewards=torch.tensor([7.0]))
    prepared, metrics = algorithm().prepare(batch, batch.counts(8))
    assert prepared is batch
    assert metrics == {}
    with pytest.raises(ConfigError, match=r"overlong_penalty=2.0: has no effect with overlong_buffer_tokens=0"):
        algorithm(overlong_penalty=2.0)
