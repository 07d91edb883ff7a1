import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ebbtide.algorithms.gpg import GPG
from ebbtide.algorithms.grpo import GRPO
from ebbtide.algorithms.policy_gradient import given
from ebbtide.config import validate
from ebbtide.errors import ConfigError, EngineError
from ebbtide.types import TrainBatch
from tests.algorithms.cases import batch_of, inputs_of, logprobs_of


def shifted(batch: TrainBatch, log_ratios: list[float]) -> Tensor:
    """[T] the rollout's log-probs plus these on the trained tokens."""
    old_T = batch.rollout_logprobs.clone()
    old_T[batch.loss_mask] += torch.tensor(log_ratios)
    return old_T


def grpo(**settings: object) -> GRPO:
    return GRPO(validate(GRPO.Config, {"type": "grpo", **settings}))


def test_decoupled_correction_by_hand() -> None:
    # old / rollout is 3 and 0.5: weights 2 and 0.5. The clipped ratio is policy / old = 1.1 on both.
    batch = batch_of([[-2.0], [-1.0]], advantages=[1.0, -1.0])
    batch = replace(batch, old_logprobs=shifted(batch, [math.log(3), math.log(0.5)]))
    algorithm = grpo(old_policy="recomputed", correction={"weight": "token"})
    prepared, metrics = algorithm.prepare(batch, batch.counts(4))
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([2.0, -0.5])
    assert metrics["correction/effective_sample_ratio"].value == pytest.approx(2.5**2 / (2 * 4.25))
    policy = logprobs_of(batch, [-2 + math.log(3.3), -1 + math.log(0.55)])
    loss, loss_metrics = algorithm.loss(inputs_of(prepared, policy))
    assert loss.item() == pytest.approx(-(1.1 * 2 - 1.1 * 0.5) / 2)
    assert loss_metrics["policy/ratio_mean"].value == pytest.approx(1.1)
    assert "correction/ratio_mean" not in loss_metrics


def test_normalized_weights_have_a_mean_of_one() -> None:
    batch = batch_of([[-2.0], [-1.0]], advantages=[1.0, 1.0])
    batch = replace(batch, old_logprobs=shifted(batch, [math.log(1.5), math.log(0.5)]))
    algorithm = grpo(old_policy="recomputed", correction={"weight": "token", "normalize": True})
    prepared, _ = algorithm.prepare(batch, batch.counts(4))
    assert prepared.advantages[batch.loss_mask].tolist() == pytest.approx([1.5, 0.5])


def test_decoupled_measures_even_when_it_corrects_nothing() -> None:
    batch = batch_of([[-2.0]], advantages=[1.0])
    batch = replace(batch, old_logprobs=shifted(batch, [0.1]))
    prepared, metrics = grpo(old_policy="recomputed").prepare(batch, batch.counts(4))
    assert torch.equal(prepared.advantages, batch.advantages)
    assert metrics["correction/ratio_mean"].value == pytest.approx(math.exp(0.1))


def test_bypass_rejects_in_the_loss_and_keeps_the_counts() -> None:
    batch = batch_of([[-2.0], [-1.0]], advantages=[1.0, 1.0])
    algorithm = grpo(correction={"reject": "token", "reject_above": 1.5})
    assert algorithm.prepare(batch, batch.counts(4)) == (batch, {})
    loss, metrics = algorithm.loss(inputs_of(batch, logprobs_of(batch, [-2 + math.log(1.6), -1 + math.log(1.1)])))
    assert loss.item() == pytest.approx(-1.1 / 2)
    assert metrics["correction/rejected_ratio"].value == 0.5


def test_kl_and_entropy_outlive_a_rejection() -> None:
    batch = batch_of([[-2.0]], advantages=[1.0])
    algorithm = grpo(correction={"reject": "token", "reject_above": 1.5}, entropy_coef=0.5)
    inputs = replace(inputs_of(batch, logprobs_of(batch, [-1.0])), entropy=torch.full((3,), 0.4))
    assert algorithm.loss(inputs)[0].item() == pytest.approx(-0.2)


def test_drift_is_measured_from_the_old_policy() -> None:
    # KL(old || policy) of a token the old policy sampled, k3 on log old / policy = -0.5: exp(0.5) - 1 - 0.5.
    batch = batch_of([[-2.0]], advantages=[1.0])
    _, metrics = GPG(GPG.Config()).loss(inputs_of(batch, logprobs_of(batch, [-1.5])))
    assert metrics["policy/kl_nats"].value == pytest.approx(math.exp(0.5) - 1.5)


def test_a_correction_without_its_place_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(correction={"weight": "token", "normalize": True})
    assert len(caught.value.problems) == 2
    assert "would count it twice. Set old_policy='recomputed'" in str(caught.value)


def test_what_needs_promised_must_be_there() -> None:
    with pytest.raises(EngineError, match=r"old_logprobs=None: the algorithm's needs name it, and the batch lacks it"):
        given(None, "old_logprobs")
    batch = batch_of([[-2.0]], advantages=[1.0])
    with pytest.raises(EngineError, match="ref_logprobs=None"):
        grpo(kl={"coef": 0.1}).loss(inputs_of(batch, logprobs_of(batch, [-1.0])))
