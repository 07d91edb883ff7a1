"""Scores into groups; failures named by reward, value and row, and the run stopped or the group left out."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.config import validate
from ebbtide.errors import ConfigError, RewardError
from ebbtide.rewards.exact import ExactReward
from ebbtide.rewards.function import FunctionReward
from ebbtide.rewards.scoring import Rewards, ScoredGroups, score
from ebbtide.types import Completion, Group, Prompt, StopReason

FUNCTIONS = """
import os
import time


def length(completions, **columns):
    return [len(text) for text in completions]


def row(completions, number, **columns):
    return [10 * n for n in number]


def raises(completions, **columns):
    if "22" in completions:
        raise KeyError("boom")
    return [1.0] * len(completions)


def short(completions, **columns):
    return [1.0] * (len(completions) - 1)


def short_once(completions, **columns):
    return [1.0] * (len(completions) - ("22" in completions))


def nan(completions, **columns):
    return [float("nan") if text == "22" else 1.0 for text in completions]


def infinite(completions, **columns):
    return [float("-inf") if text == "22" else 1.0 for text in completions]


def none(completions, **columns):
    return [None if text == "22" else 1.0 for text in completions]


def nothing(completions, **columns):
    pass


def hangs(completions, **columns):
    while "22" in completions:
        pass
    return [1.0] * len(completions)


def slow(completions, **columns):
    time.sleep(0.1 * len(completions))
    return [1.0] * len(completions)


def dies(completions, **columns):
    if "22" in completions:
        os._exit(3)
    return [1.0] * len(completions)


def crowd(completions, **columns):
    if len(completions) > 3:
        raise RuntimeError("too many")
    return [1.0] * len(completions)


def group_of_three(completions, **columns):
    if len(completions) % 3:
        raise RuntimeError("no whole group")
    if "22" in completions:
        raise RuntimeError("this group")
    return [1.0] * len(completions)
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., FunctionReward.Config]:
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return lambda function, /, **settings: validate(FunctionReward.Config, {"path": f"{path}:{function}", **settings})


def _groups(num_groups: int = 4, size: int = 3) -> list[Group]:
    """Group g of row 100 + g; completion c has the two tokens g and c, and so the text `gc`."""
    return [
        Group(
            Prompt(100 + g, torch.tensor([0]), {"prompt": f"p{g}", "answer": f"{g}0", "number": g}),
            tuple(
                Completion(
                    g * size + c,
                    torch.tensor([g, c]),
                    torch.zeros(2),
                    torch.zeros(2, dtype=torch.int32),
                    StopReason.EOS,
                )
                for c in range(size)
            ),
        )
        for g in range(num_groups)
    ]


def _decode(token_ids: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(map(str, ids)) for ids in token_ids]


@contextmanager
def _opened(*configs: Any) -> Iterator[Rewards]:
    with Rewards(configs) as rewards:
        yield rewards


def _score(*configs: Any, groups: Sequence[Group] | None = None) -> ScoredGroups:
    with _opened(*configs) as rewards:
        return score(_groups() if groups is None else groups, rewards, _decode)


def test_scores_fill_the_groups() -> None:
    scored = _score(validate(ExactReward.Config, {}))
    assert [group.prompt.index for group in scored.groups] == [100, 101, 102, 103]
    for group in scored.groups:
        assert group.rewards is not None
        assert group.rewards.tolist() == [1, 0, 0]
        assert group.rewards.dtype == torch.float32
        assert group.reward_parts["exact"].tolist() == [1, 0, 0]
    assert (scored.num_skipped, dict(scored.errors), scored.messages) == (0, {}, ())
    assert list(scored.seconds) == ["exact"]


def test_rewards_are_a_weighted_sum_and_parts_are_unweighted(config: Callable[..., Any]) -> None:
    """Row 103: 0.5 * exact + 0.25 * 2 letters - 1 * (10 * 3) is 0.5 + 0.5 - 30 for the right answer, else 0.5 - 30."""
    scored = _score(
        validate(ExactReward.Config, {"weight": 0.5}),
        config("length", weight=0.25),
        config("row", weight=-1, name="number"),
        config("nan", weight=0, on_error="skip_group"),
    )
    group = {group.prompt.index: group for group in scored.groups}
    assert 102 not in group, "a weight of 0 still judges, and still fails"
    assert group[103].rewards is not None
    assert group[103].rewards.tolist() == [0.5 + 0.5 - 30, 0.5 - 30, 0.5 - 30]
    assert {name: part.tolist() for name, part in group[103].reward_parts.items()} == {
        "exact": [1, 0, 0],
        "length": [2, 2, 2],
        "number": [30, 30, 30],
        "nan": [1, 1, 1],
    }


def test_texts_are_decoded_once_for_all_rewards(config: Callable[..., Any]) -> None:
    calls: list[int] = []

    def decode(token_ids: Sequence[Sequence[int]]) -> list[str]:
        calls.append(len(token_ids))
        return _decode(token_ids)

    with _opened(config("length"), config("row")) as rewards:
        score(_groups(), rewards, decode)
    assert calls == [12]


def test_groups_of_different_sizes_and_none_at_all(config: Callable[..., Any]) -> None:
    groups = [_groups(1, 1)[0], _groups(2, 4)[1]]
    with _opened(config("length")) as rewards:
        scored = score(groups, rewards, _decode)
        assert [group.rewards.tolist() for group in scored.groups if group.rewards is not None] == [[2], [2, 2, 2, 2]]
        assert score([], rewards, _decode).groups == ()


CAUSES = {
    "raises": r"raised KeyError: 'boom'",
    "short_once": r"returned 0 scores for 1 completion\.",
    "nan": r"returned nan, and a score is one finite number",
    "infinite": r"returned -inf, and a score is one finite number",
    "none": r"returned None \(NoneType\), and a score is one finite number",
    "hangs": r"did not return within 1\.2 s for all 12 completions, nor within 0\.1 s for this alone",
    "dies": r"ended its process \(exit code 3\)",
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_failure_stops_the_run_and_names_reward_row_and_completion(name: str, config: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=rf"^reward {name}, row 102, completion 2='22': {CAUSES[name]}") as caught:
        _score(config(name, time_limit_s=1.2 if name == "hangs" else 30))
    assert "on_error='skip_group'" in str(caught.value)


@pytest.mark.parametrize("name", CAUSES)
def test_a_failure_leaves_out_its_group_alone(name: str, config: Callable[..., Any]) -> None:
    scored = _score(
        config(name, on_error="skip_group", time_limit_s=1.2 if name == "hangs" else 30), config("length", weight=0)
    )
    assert [group.prompt.index for group in scored.groups] == [100, 101, 103]
    assert all(group.rewards is not None and group.rewards.tolist() == [1, 1, 1] for group in scored.groups)
    assert (scored.num_skipped, dict(scored.errors)) == (1, {name: 1})
    assert len(scored.messages) == 1
    assert f"reward {name}, row 102, completion 2='22'" in scored.messages[0]


def test_an_exception_brings_its_traceback(config: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r'my_rewards.py", line \d+, in raises'):
        _score(config("raises"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("short", r"row 100, completion 0='00': returned 0 scores for 1 completion"),
        ("nothing", r"row 100, completion 0='00': returned None \(NoneType\) for 1 completion"),
    ],
)
def test_a_reward_that_never_works_names_the_first_row_or_all(name: str, text: str, config: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=text):
        _score(config(name))
    scored = _score(config(name, on_error="skip_group"))
    assert (len(scored.groups), scored.num_skipped, len(scored.messages)) == (0, 4, 4)


def test_a_failure_of_the_crowd_names_all_rows_in_flight(config: Callable[..., Any]) -> None:
    text = r"reward crowd, rows 100, 101, 102, 103=\['00', '01'\]: raised RuntimeError: too many; no row by itself"
    with pytest.raises(RewardError, match=text):
        _score(config("crowd"))
    scored = _score(config("crowd", on_error="skip_group"))
    assert (len(scored.groups), scored.num_skipped, len(scored.messages)) == (4, 0, 1)


def test_many_rows_in_flight_are_named_in_part(config: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"rows 100, 101, 102, 103, 104, 105, 106, 107 and 2 more="):
        _score(config("crowd"), groups=_groups(10, 1))


def test_a_group_that_fails_only_as_a_whole_is_named_as_one(config: Callable[..., Any]) -> None:
    """Single completions fail for a reason of their own; the reward is told of whole groups, and judges those."""
    scored = _score(config("group_of_three", on_error="skip_group"))
    assert [group.prompt.index for group in scored.groups] == [100, 101, 103]


def test_a_slow_reward_ends_within_twice_its_limit(config: Callable[..., Any]) -> None:
    started = time.monotonic()
    scored = _score(config("slow", time_limit_s=0.4, on_error="skip_group"))
    assert time.monotonic() - started < 10
    assert (len(scored.groups), scored.num_skipped) == (0, 4)
    assert "raise time_limit_s if it is only slow" in scored.messages[0]


def test_after_a_failure_the_next_step_is_scored(config: Callable[..., Any]) -> None:
    with _opened(config("hangs", time_limit_s=0.6)) as rewards:
        for _ in range(2):
            with pytest.raises(RewardError):
                score(_groups(), rewards, _decode)
            assert len(score(_groups(2), rewards, _decode).groups) == 2


def test_two_rewards_of_one_name_are_refused(config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"rewards.1.name='length': two rewards have this name"):
        Rewards([config("length"), config("length")])
    with _opened(config("length"), config("length", name="again")) as rewards:
        assert len(rewards) == 2


def test_a_reward_that_cannot_be_made_leaves_no_process(config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="has no function 'lenght'"):
        Rewards([config("length"), config("lenght")])


def test_a_long_text_is_cut_in_the_message(config: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"completion 0='x{80}\.\.\.'"), _opened(config("nothing")) as rewards:
        score(_groups(1, 1), rewards, lambda ids: ["x" * 1000] * len(ids))
