import pytest
import torch

from ebbtide.algorithms.credit import gae, outcome_rewards, rewards_to_go
from ebbtide.algorithms.reduction import Packed
from tests.algorithms.cases import batch_of, packed_of
from tests.reference.algorithms import gae_by_definition, returns_by_definition


def test_outcomes_stand_on_the_last_trained_token() -> None:
    batch = batch_of([[-1.0] * 2, [], [-1.0]], rewards=[3.0, 9.0, 5.0])
    rewards_T = outcome_rewards(batch.rewards, Packed.of(batch))
    assert rewards_T.tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 5]


def test_outcomes_when_the_last_token_is_not_trained() -> None:
    batch = batch_of([[-1.0] * 3], rewards=[3.0])
    batch.loss_mask[4] = False
    assert outcome_rewards(batch.rewards, Packed.of(batch)).tolist() == [0, 0, 0, 3, 0]


def test_rewards_to_go_by_hand() -> None:
    # 1, 2, 4 with gamma 1/2: 4; 2 + 2 = 4; 1 + 2 = 3. The next sequence is another story.
    packed = packed_of([3, 1])
    rewards_T = torch.tensor([0, 0, 1.0, 2.0, 4.0, 0, 0, 8.0])
    assert rewards_to_go(rewards_T, packed, 0.5).tolist() == [0, 0, 3, 4, 4, 0, 0, 8]


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.3])
def test_rewards_to_go_match_the_definition(gamma: float) -> None:
    lengths = [1, 2, 3, 4, 5, 8, 9, 33, 0, 64, 65]
    packed = packed_of(lengths)
    rewards_T = packed.trained(torch.randn(len(packed.loss_mask), dtype=torch.float64))
    found_T = rewards_to_go(rewards_T, packed, gamma)
    for b in range(len(lengths)):
        here_T = packed.loss_mask & (packed.sequence_ids == b)
        expected = returns_by_definition(rewards_T[here_T].tolist(), gamma)
        assert found_T[here_T].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_matches_the_definition_and_passes_over_gaps(gamma: float, lam: float) -> None:
    batch = batch_of([[-1.0] * 9, [-1.0] * 4, [-1.0]])
    batch.loss_mask[4:7] = False  # a tool's answer in the middle of the first completion
    packed = Packed.of(batch)
    rewards_T = packed.trained(torch.randn(batch.num_tokens, dtype=torch.float64))
    values_T = torch.randn(batch.num_tokens, dtype=torch.float64)
    advantages_T, returns_T = gae(rewards_T, values_T, packed, gamma, lam)
    for b in range(3):
        here_T = packed.loss_mask & (packed.sequence_ids == b)
        expected = gae_by_definition(rewards_T[here_T].tolist(), values_T[here_T].tolist(), gamma, lam)
        assert advantages_T[here_T].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(returns_T, packed.trained(advantages_T + values_T))


def test_nothing_trained() -> None:
    packed = packed_of([0, 0])
    assert not rewards_to_go(torch.zeros(4), packed, 1.0).any()
    assert not outcome_rewards(torch.ones(2), packed).any()
