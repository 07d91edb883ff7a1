"""The order in which ranks of a pipeline work, as plain data: 1F1B, its interleaved form, and forward only.

Stage s lives on rank s % pp. Every rank goes through its forwards in one canonical order (groups of pp microbatches,
within a group part after part) and through its backwards in another (parts in falling order); a forward waits while
as many of the rank's microbatches are in flight as the pipeline is deep. So what a rank holds depends on the depth and
never on the number of microbatches, and two neighbours' messages of one kind come in the same order on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Schedule", "forward_only", "one_f_one_b"]


@dataclass(frozen=True, slots=True)
class Action:
    """One forward or backward of one microbatch through one stage."""

    kind: Literal["forward", "backward"]
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each rank does, in order.

    Attributes:
        num_stages: of the pipeline.
        actions: of each rank.
        settled: for each rank and action, which earlier actions' messages have certainly arrived once this action has
            its input: somebody who had taken them in has since been heard of, directly or through others.
    """

    num_stages: int
    actions: tuple[tuple[Action, ...], ...]
    settled: tuple[tuple[tuple[int, ...], ...], ...]

    def source(self, action: Action) -> Action | None:
        """Whose message the action needs; None where it needs none of another stage."""
        step = -1 if action.kind == "forward" else 1
        stage = action.stage + step
        return Action(action.kind, stage, action.microbatch) if 0 <= stage < self.num_stages else None

    def target(self, action: Action) -> Action | None:
        """Who needs the action's result; None where nobody does."""
        step = 1 if action.kind == "forward" else -1
        stage = action.stage + step
        return Action(action.kind, stage, action.microbatch) if 0 <= stage < self.num_stages else None


def one_f_one_b(pp: int, parts_per_rank: int, num_microbatches: int) -> Schedule:
    """Forwards and backwards alternate as soon as the pipeline is full.

    Args:
        pp: ranks.
        parts_per_rank: stages of each; more than one is the interleaved schedule.
        num_microbatches: any number.

    Example:
        >>> schedule = one_f_one_b(2, 1, 3)
        >>> [f"{action.kind[0]}{action.microbatch}" for action in schedule.actions[0]]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
        >>> [f"{action.kind[0]}{action.microbatch}" for action in schedule.actions[1]]
        ['f0', 'b0', 'f1', 'b1', 'f2', 'b2']
    """
    num_stages = pp * parts_per_rank
    forwards = [_forwards(rank, pp, parts_per_rank, num_microbatches) for rank in range(pp)]
    backwards = [_backwards(rank, pp, parts_per_rank, num_microbatches) for rank in range(pp)]
    limits = [_max_in_flight(rank, pp, parts_per_rank) for rank in range(pp)]
    done: set[Action] = set()
    actions: list[list[Action]] = [[] for _ in range(pp)]
    at_forward, at_backward = [0] * pp, [0] * pp
    while any(at_backward[rank] < len(backwards[rank]) for rank in range(pp)):
        chosen: list[Action] = []
        for rank in range(pp):  # each sees what was done before this tick
            f, b = at_forward[rank], at_backward[rank]
            if b < len(backwards[rank]) and _is_ready(backwards[rank][b], done, num_stages):
                action, at_backward[rank] = backwards[rank][b], b + 1
            elif f < len(forwards[rank]) and f - b < limits[rank] and _is_ready(forwards[rank][f], done, num_stages):
                action, at_forward[rank] = forwards[rank][f], f + 1
            else:
                continue
            actions[rank].append(action)
            chosen.append(action)
        if not chosen:  # a last group smaller than the pipeline can need more room
            limits = [limit + 1 for limit in limits]
        done.update(chosen)
    return _schedule(num_stages, actions)


def forward_only(pp: int, parts_per_rank: int, num_microbatches: int) -> Schedule:
    """For scoring: no backward follows."""
    actions = [_forwards(rank, pp, parts_per_rank, num_microbatches) for rank in range(pp)]
    return _schedule(pp * parts_per_rank, actions)


def _forwards(rank: int, pp: int, parts: int, num: int) -> list[Action]:
    return [
        Action("forward", rank + pp * part, microbatch)
        for start in range(0, num, pp)
        for part in range(parts)
        for microbatch in range(start, min(start + pp, num))
    ]


def _backwards(rank: int, pp: int, parts: int, num: int) -> list[Action]:
    return [
        Action("backward", rank + pp * part, microbatch)
        for start in range(0, num, pp)
        for part in reversed(range(parts))
        for microbatch in range(start, min(start + pp, num))
    ]


def _max_in_flight(rank: int, pp: int, parts: int) -> int:
    """Forwards ahead of backwards that keep every rank busy."""
    return pp - rank if parts == 1 else 2 * (pp - rank - 1) + (parts - 1) * pp + 1


def _is_ready(action: Action, done: set[Action], num_stages: int) -> bool:
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "forward":
        return stage == 0 or Action(kind, stage - 1, microbatch) in done
    is_last = stage == num_stages - 1
    return Action("forward", stage, microbatch) in done and (is_last or Action(kind, stage + 1, microbatch) in done)


def _schedule(num_stages: int, actions: list[list[Action]]) -> Schedule:
    bare = Schedule(num_stages, tuple(tuple(mine) for mine in actions), ())
    return Schedule(num_stages, bare.actions, _settled(bare))


def _settled(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """By vector clocks: a message carries how far its sender knows every rank to have come."""
    pp = len(schedule.actions)
    place = {action: (rank, i) for rank, mine in enumerate(schedule.actions) for i, action in enumerate(mine)}
    clocks: list[list[int]] = [[-1] * pp for _ in range(pp)]
    carried: dict[Action, list[int]] = {}
    pending: list[list[tuple[int, int, int]]] = [[] for _ in range(pp)]  # (own action, target's rank, target's action)
    settled: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    at = [0] * pp
    while any(at[rank] < len(schedule.actions[rank]) for rank in range(pp)):
        for rank in range(pp):
            while at[rank] < len(schedule.actions[rank]):
                action = schedule.actions[rank][at[rank]]
                source = schedule.source(action)
                if source is not None and source not in carried:
                    break
                _advance(clocks[rank], rank, at[rank], carried.pop(source) if source is not None else None)
                known = [item for item in pending[rank] if clocks[rank][item[1]] >= item[2]]
                pending[rank] = [item for item in pending[rank] if item not in known]
                settled[rank].append(tuple(own for own, _, _ in known))
                target = schedule.target(action)
                if target is not None:
                    carried[action] = list(clocks[rank])
                    pending[rank].append((at[rank], *place[target]))
                at[rank] += 1
    return tuple(tuple(mine) for mine in settled)


def _advance(clock: list[int], rank: int, index: int, heard: Sequence[int] | None) -> None:
    for other, step in enumerate(heard or ()):
        clock[other] = max(clock[other], step)
    clock[rank] = index
