import math

import pytest
import torch

from ebbtide.algorithms.gspo import GSPO
from ebbtide.config import validate
from tests.algorithms.cases import assert_matches, batch_of, inputs_of, logprobs_of
from tests.reference.algorithms import gspo_loss


def algorithm(**settings: object) -> GSPO:
    return GSPO(validate(GSPO.Config, {"type": "gspo", **settings}))


def test_loss_and_gradient_by_hand() -> None:
    # Log ratios 0.3 and -0.1: the mean is 0.1, the ratio e^0.1, under 1.2: the loss -e^0.1; each token has half of it.
    batch = batch_of([[-1.0, -1.0]], advantages=[1.0])
    logprobs = logprobs_of(batch, [-0.7, -1.1])
    loss, metrics = algorithm(clip_low=0.2, clip_high=0.2).loss(inputs_of(batch, logprobs))
    assert loss.item() == pytest.approx(-math.exp(0.1))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[batch.loss_mask].tolist() == pytest.approx([-math.exp(0.1) / 2] * 2)
    assert metrics["policy/ratio_mean"].value == pytest.approx(math.exp(0.1))


def test_a_sequence_is_clipped_as_a_whole() -> None:
    batch = batch_of([[-1.0, -1.0]], advantages=[1.0])
    logprobs = logprobs_of(batch, [-0.7, -1.1])
    loss, metrics = algorithm().loss(inputs_of(batch, logprobs))
    assert loss.item() == pytest.approx(-1.0004)
    assert not torch.autograd.grad(loss, logprobs)[0].any()
    assert metrics["policy/clipped_high_ratio"].value == 1


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.1, 0.1), (0.9, 9.0)])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_matches_the_reference(low: float, high: float, aggregation: str) -> None:
    gspo = algorithm(clip_low=low, clip_high=high, aggregation=aggregation)
    assert_matches(gspo, gspo_loss(low, high), aggregation)
