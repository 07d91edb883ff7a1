import math

import pytest
import torch

from ebbtide.algorithms.cispo import CISPO
from ebbtide.config import validate
from ebbtide.errors import ConfigError
from tests.algorithms.cases import assert_matches, batch_of, inputs_of, logprobs_of
from tests.reference.algorithms import cispo_loss


def algorithm(**settings: object) -> CISPO:
    return CISPO(validate(CISPO.Config, {"type": "cispo", **settings}))


def test_loss_and_gradient_by_hand() -> None:
    # Ratios 3 and 0.5, weights 2 and 0.5: each token keeps a gradient of -weight x advantage / 2.
    batch = batch_of([[-2.0], [-1.0]], advantages=[1.0, -1.0])
    logprobs = logprobs_of(batch, [-2 + math.log(3), -1 + math.log(0.5)])
    loss, metrics = algorithm(max_ratio=2.0).loss(inputs_of(batch, logprobs))
    assert loss.item() == pytest.approx((-2 * (-2 + math.log(3)) + 0.5 * (-1 + math.log(0.5))) / 2)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[batch.loss_mask].tolist() == pytest.approx([-1.0, 0.25])
    assert metrics["policy/clipped_ratio"].value == 0.5


@pytest.mark.parametrize(("least", "most"), [(0.0, 5.0), (0.9, 1.1)])
def test_matches_the_reference(least: float, most: float) -> None:
    assert_matches(algorithm(min_ratio=least, max_ratio=most), cispo_loss(least, most), "token_mean")


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_ratio=6.0: must be below max_ratio=5.0"):
        algorithm(min_ratio=6.0)
    with pytest.raises(ConfigError, match=r"correction.weight='token': the objective weighs by policy / rollout"):
        algorithm(correction={"weight": "token"})
    assert algorithm(correction={"weight": "token"}, old_policy="recomputed").config.correction.is_active
