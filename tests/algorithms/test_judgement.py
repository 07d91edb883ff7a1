import math

import pytest
import torch

from ebbtide.algorithms.judgement import flatten, group_deviation, group_mean_of_others, group_std, split, standardize
from tests.algorithms.cases import group_of


def test_groups_of_unequal_size_by_hand() -> None:
    groups = [group_of([1, 0]), group_of([5]), group_of([2, 4, 9])]
    rewards_B, group_ids_B = flatten(groups)
    assert rewards_B.tolist() == [1, 0, 5, 2, 4, 9]
    assert group_ids_B.tolist() == [0, 0, 1, 2, 2, 2]
    assert group_deviation(rewards_B, group_ids_B).tolist() == [0.5, -0.5, 0, -3, -1, 4]
    assert group_mean_of_others(rewards_B, group_ids_B).tolist() == [0, 1, 0, 6.5, 5.5, 3]
    assert group_std(rewards_B, group_ids_B).tolist() == pytest.approx(
        [math.sqrt(0.5)] * 2 + [0] + [math.sqrt(13.0)] * 3
    )
    assert [[float(x) for x in part] for part in split(rewards_B, groups)] == [[1, 0], [5], [2, 4, 9]]


def test_no_groups() -> None:
    rewards_B, group_ids_B = flatten([])
    assert group_deviation(rewards_B, group_ids_B).tolist() == []
    assert split(rewards_B, []) == []


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e6 + 0.3, 1e-30])
@pytest.mark.parametrize("size", [2, 3, 7, 100])
def test_equal_rewards_deviate_by_exactly_zero(reward: float, size: int) -> None:
    rewards_B, group_ids_B = flatten([group_of([reward] * size), group_of([1, 0])])
    assert not group_deviation(rewards_B, group_ids_B)[:size].any()
    assert not group_std(rewards_B, group_ids_B)[:size].any()
    assert torch.equal(group_mean_of_others(rewards_B, group_ids_B)[:size], rewards_B[:size])


def test_group_ids_may_have_gaps() -> None:
    assert group_deviation(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([4, 4, 9])).tolist() == [-1, 1, 0]


def test_standardize_counts_what_is_weighed_alone() -> None:
    # 1, 3 count, 100 does not: mean 2, std sqrt(2).
    found = standardize(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]), eps=0.0)
    assert found[:2].tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_standardize_of_equal_or_single_values_is_zero() -> None:
    assert standardize(torch.full((5,), 0.1), torch.ones(5), eps=1e-8).tolist() == [0] * 5
    assert standardize(torch.tensor([7.0]), torch.ones(1), eps=1e-8).tolist() == [0]
