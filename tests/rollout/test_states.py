"""Every way through the states, by a model of them that is written down apart."""

import asyncio
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import RolloutError
from ebbtide.rollout.base import Asleep, Awake, Loading, RolloutState, require_awake
from ebbtide.rollout.states import Gate


def receive(gate: Gate, version: int, *, breaks: bool = False) -> None:
    with gate.receiving(version):
        assert gate.state == Loading(version)
        if breaks:
            raise ConnectionError("the trainer died")


ACTIONS: dict[str, Callable[[Gate], object]] = {
    "push 1": lambda gate: receive(gate, 1),
    "push 2": lambda gate: receive(gate, 2),
    "torn push 2": lambda gate: receive(gate, 2, breaks=True),
    "sleep 1": lambda gate: gate.sleep(1),
    "sleep 2": lambda gate: gate.sleep(2),
    "wake": lambda gate: gate.wake("all"),
    "wake cache": lambda gate: gate.wake("cache"),
    "resume": lambda gate: gate.resume(),
}


def after(state: RolloutState, action: str, slept: int) -> RolloutState | None:
    """The state that follows; None where the action is refused. `slept` is the version that went to sleep."""
    if action.endswith(("push 1", "push 2")):
        if isinstance(state, Asleep):
            return None
        version = int(action[-1])
        return Loading(version) if action.startswith("torn") else Awake(version)
    if action.startswith("sleep"):
        level: Literal[1, 2] = 1 if action.endswith("1") else 2
        return Asleep(level) if isinstance(state, Awake) else None
    if action == "wake" and isinstance(state, Asleep):
        return Awake(slept) if state.level == 1 else Loading(slept)
    if action == "resume" and not isinstance(state, Awake):
        return None
    return state


@given(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=12))
def test_states_follow_the_table(actions: list[str]) -> None:
    gate, expected, slept = Gate(), Loading(0), 0
    state: RolloutState = expected
    for action in actions:
        following = after(state, action, slept)
        if isinstance(state, Awake):
            slept = state.version
        if following is None:
            with pytest.raises(RolloutError):
                ACTIONS[action](gate)
        elif action.startswith("torn"):
            with pytest.raises(ConnectionError):
                ACTIONS[action](gate)
        else:
            ACTIONS[action](gate)
        state = state if following is None else following
        assert gate.state == state


def test_a_second_push_at_the_same_time_is_refused() -> None:
    gate = Gate()
    with gate.receiving(1):
        with pytest.raises(RolloutError, match="another push is under way"):
            receive(gate, 2)
        assert gate.state == Loading(1)
    assert require_awake(gate.state) == 1


def test_nothing_changes_under_running_requests() -> None:
    gate = Gate()
    receive(gate, 1)
    with gate.generating():
        for action in ("push 2", "sleep 1"):
            with pytest.raises(RolloutError, match=r"generating=1.*Pause first"):
                ACTIONS[action](gate)
        gate.pause()
        receive(gate, 2)
        gate.sleep(1)
        gate.wake("all")
        gate.resume()
    receive(gate, 3)


def test_a_turn_waits_for_the_resume_and_has_the_version_of_then() -> None:
    async def test() -> None:
        gate = Gate()
        receive(gate, 1)
        assert await gate.turn() == 1
        gate.pause()
        waiting = asyncio.create_task(gate.turn())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        receive(gate, 2)
        gate.resume()
        assert await waiting == 2

    asyncio.run(test())


def test_closing_ends_who_waits() -> None:
    async def test() -> None:
        gate = Gate()
        receive(gate, 1)
        gate.pause()
        waiting = asyncio.create_task(gate.turn())
        await asyncio.sleep(0)
        assert gate.close()
        assert not gate.close()
        with pytest.raises(RolloutError, match="closed"):
            await waiting
        for action in ("push 1", "wake", "sleep 1", "resume"):
            with pytest.raises(RolloutError, match="closed"):
                ACTIONS[action](gate)
        gate.pause()
        assert gate.state == Asleep(2)

    asyncio.run(test())


def test_a_version_that_was_not_announced_is_refused() -> None:
    assert require_awake(Awake(3)) == require_awake(Awake(3), 3) == 3
    with pytest.raises(RolloutError, match="weights of version 4 were announced"):
        require_awake(Awake(3), 4)
    with pytest.raises(RolloutError, match="Push weights first"):
        require_awake(Loading(3))
    with pytest.raises(RolloutError, match="Wake it"):
        require_awake(Asleep(1))
