"""Pipeline schedules: every action once, nobody waits for ever, and depth alone bounds what is held."""

import pytest

from ebbtide.engines.schedule import Action, Schedule, forward_only, one_f_one_b

SHAPES = [
    (pp, parts, num) for pp in (1, 2, 3, 4) for parts in (1, 2, 3) for num in (0, 1, 2, 3, 5, 8) if pp > 1 or parts == 1
]


def written(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{action.kind[0]}{action.stage}.{action.microbatch}" for action in schedule.actions[rank])


def test_two_ranks_by_hand() -> None:
    schedule = one_f_one_b(2, 1, 3)
    assert written(schedule, 0) == "f0.0 f0.1 b0.0 f0.2 b0.1 b0.2"
    assert written(schedule, 1) == "f1.0 b1.0 f1.1 b1.1 f1.2 b1.2"


def test_interleaved_by_hand() -> None:
    """Two ranks with stages 0, 2 and 1, 3: a group of two microbatches goes through all before the next comes."""
    schedule = one_f_one_b(2, 2, 2)
    assert written(schedule, 0) == "f0.0 f0.1 f2.0 f2.1 b2.0 b2.1 b0.0 b0.1"
    assert written(schedule, 1) == "f1.0 f1.1 f3.0 b3.0 f3.1 b3.1 b1.0 b1.1"


def test_forward_only_by_hand() -> None:
    schedule = forward_only(2, 1, 2)
    assert written(schedule, 0) == "f0.0 f0.1"
    assert written(schedule, 1) == "f1.0 f1.1"


@pytest.mark.parametrize(("pp", "parts", "num"), SHAPES)
def test_every_microbatch_goes_through_every_stage_once(pp: int, parts: int, num: int) -> None:
    schedule = one_f_one_b(pp, parts, num)
    done = [action for mine in schedule.actions for action in mine]
    expected = {
        Action(kind, stage, microbatch)
        for kind in ("forward", "backward")
        for stage in range(pp * parts)
        for microbatch in range(num)
    }
    assert len(done) == len(expected)
    assert set(done) == expected
    for rank, mine in enumerate(schedule.actions):
        assert all(action.stage % pp == rank for action in mine)


@pytest.mark.parametrize(("pp", "parts", "num"), SHAPES)
def test_ranks_that_work_through_their_lists_never_block(pp: int, parts: int, num: int) -> None:
    for schedule in (one_f_one_b(pp, parts, num), forward_only(pp, parts, num)):
        done: set[Action] = set()
        at = [0] * pp
        moved = True
        while moved:
            moved = False
            for rank, mine in enumerate(schedule.actions):
                while at[rank] < len(mine):
                    source = schedule.source(mine[at[rank]])
                    if source is not None and source not in done:
                        break
                    done.add(mine[at[rank]])
                    at[rank] += 1
                    moved = True
        assert at == [len(mine) for mine in schedule.actions]


@pytest.mark.parametrize(("pp", "parts"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_what_is_in_flight_depends_on_the_depth_alone(pp: int, parts: int) -> None:
    def most(num: int) -> list[int]:
        found = []
        for mine in one_f_one_b(pp, parts, num).actions:
            held, peak = 0, 0
            for action in mine:
                held += 1 if action.kind == "forward" else -1
                peak = max(peak, held)
            found.append(peak)
        return found

    assert most(16) == most(64)
    assert max(most(64)) <= (2 * pp - 1) + (parts - 1) * pp
    if parts == 1:
        assert most(64) == [pp - rank for rank in range(pp)]


@pytest.mark.parametrize(("pp", "parts", "num"), [(2, 1, 8), (4, 1, 9), (2, 2, 8), (3, 2, 7), (4, 2, 16)])
def test_messages_between_two_ranks_keep_their_order(pp: int, parts: int, num: int) -> None:
    """Where messages are told apart by order alone, sender and receiver must agree on it, kind by kind."""
    schedule = one_f_one_b(pp, parts, num)
    for kind in ("forward", "backward"):
        for sender in range(pp):
            sent = [a for a in schedule.actions[sender] if a.kind == kind and schedule.target(a) is not None]
            for receiver in range(pp):
                to = [a for a in sent if schedule.target(a).stage % pp == receiver]  # type: ignore[union-attr]
                sources = [schedule.source(a) for a in schedule.actions[receiver] if a.kind == kind]
                taken = [a for a in sources if a is not None and a.stage % pp == sender]
                for is_wrap in (False, True):
                    edge = pp - 1 if kind == "forward" else 0
                    part = [a for a in to if (a.stage % pp == edge) == is_wrap]
                    assert part == [a for a in taken if (a.stage % pp == edge) == is_wrap]


@pytest.mark.parametrize(("pp", "parts", "num"), [(2, 1, 32), (4, 1, 32), (2, 2, 32), (4, 2, 30)])
def test_messages_that_are_not_known_to_have_arrived_are_few(pp: int, parts: int, num: int) -> None:
    schedule = one_f_one_b(pp, parts, num)
    for rank, mine in enumerate(schedule.actions):
        pending: set[int] = set()
        most = 0
        for index, action in enumerate(mine):
            for earlier in schedule.settled[rank][index]:
                assert earlier < index
                pending.remove(earlier)
            if schedule.target(action) is not None:
                pending.add(index)
            most = max(most, len(pending))
        assert most <= 4 * pp * parts, (rank, most)


@pytest.mark.parametrize(("pp", "parts", "num"), [(2, 1, 6), (4, 1, 7), (3, 2, 8)])
def test_a_message_is_let_go_of_only_after_its_target_has_it(pp: int, parts: int, num: int) -> None:
    """Whatever the ranks' speeds: play the lists with each rank as slow as its partners allow."""
    schedule = one_f_one_b(pp, parts, num)
    for slow in range(pp):
        started: set[Action] = set()
        at = [0] * pp
        while any(at[rank] < len(schedule.actions[rank]) for rank in range(pp)):
            ready = [rank for rank in range(pp) if at[rank] < len(schedule.actions[rank])]
            ready = [rank for rank in ready if schedule.source(schedule.actions[rank][at[rank]]) in {None, *started}]
            rank = max(ready, key=lambda r: (r != slow, -at[r]))
            action = schedule.actions[rank][at[rank]]
            for earlier in schedule.settled[rank][at[rank]]:
                assert schedule.target(schedule.actions[rank][earlier]) in started
            started.add(action)
            at[rank] += 1
