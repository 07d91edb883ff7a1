import pytest

from ebbtide.algorithms.sft import SFT
from ebbtide.config import validate
from tests.algorithms.cases import batch_of, group_of, inputs_of, logprobs_of


def algorithm(**settings: object) -> SFT:
    return SFT(validate(SFT.Config, {"type": "sft", **settings}))


def weights(sft: SFT, rewards: list[float]) -> list[float]:
    return [float(a) for a in sft.advantages([group_of(rewards)])[0]]


def test_all_completions_teach_unless_a_reward_is_asked_for() -> None:
    assert weights(algorithm(), [1.0, 0.0]) == [1, 1]
    assert weights(algorithm(min_reward=0.5), [1.0, 0.0]) == [1, 0]


@pytest.mark.parametrize(("aggregation", "expected"), [("token_mean", 8 / 3), ("sequence_mean", 3.0)])
def test_loss_by_hand(aggregation: str, expected: float) -> None:
    # Negative log-probs 1, 3 | 4: their mean, or the mean of the sequences' means 2 and 4.
    batch = batch_of([[-1.0, -1.0], [-2.0]], advantages=[1.0, 1.0])
    sft = algorithm(aggregation=aggregation)
    prepared, _ = sft.prepare(batch, batch.counts(4))
    loss, metrics = sft.loss(inputs_of(prepared, logprobs_of(batch, [-1.0, -3.0, -4.0])))
    assert loss.item() == pytest.approx(expected)
    assert metrics["policy/nll_nats"].value == pytest.approx(8 / 3)


@pytest.mark.parametrize(("aggregation", "expected"), [("token_mean", 8 / 3), ("sequence_mean", 3.0)])
def test_the_loss_is_a_mean_over_what_is_learned(aggregation: str, expected: float) -> None:
    batch = batch_of([[-1.0, -1.0], [-2.0], [-9.0] * 4], advantages=[1.0, 1.0, 0.0])
    sft = algorithm(aggregation=aggregation, min_reward=0.5)
    prepared, metrics = sft.prepare(batch, batch.counts(4))
    loss, _ = sft.loss(inputs_of(prepared, logprobs_of(batch, [-1.0, -3.0, -4.0] + [-9.0] * 4)))
    assert loss.item() == pytest.approx(expected)
    assert metrics["policy/learned_ratio"].value == pytest.approx(3 / 7)


def test_nothing_good_enough_is_a_loss_of_zero() -> None:
    batch = batch_of([[-1.0]], advantages=[0.0])
    prepared, _ = algorithm(min_reward=1.0).prepare(batch, batch.counts(4))
    assert algorithm(min_reward=1.0).loss(inputs_of(prepared, logprobs_of(batch, [-1.0])))[0].item() == 0
