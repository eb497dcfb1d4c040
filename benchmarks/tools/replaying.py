"""What a schedule makes of times that its actions really took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stageline.scheduling import Action, Kind


class Chain(NamedTuple):
    """Actions of which each had to wait for the one before: how long they take, and how many."""

    seconds: float
    actions: int


_Ends = dict[tuple[bool, int, int], Chain]  # of what others wait for: is F, stage, microbatch
_START = Chain(0.0, 0)


def replay(rows: Sequence[Sequence[tuple[Action, float]]], num_stages: int) -> Chain:
    """Return the makespan of rows whose actions take just these seconds, and nothing else does."""
    ends: _Ends = {}
    positions, free = [0] * len(rows), [_START] * len(rows)
    remaining = sum(map(len, rows))
    while remaining:
        before = remaining
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                action, duration = row[positions[rank]]
                ready = _ready(action, ends, num_stages)
                if ready is None:
                    break
                seconds, actions = max(free[rank], ready)
                free[rank] = Chain(seconds + duration, actions + 1)
                if action.kind not in (Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE):
                    is_forward = action.kind is Kind.FORWARD
                    ends[is_forward, action.stage, action.microbatch] = free[rank]
                positions[rank] += 1
                remaining -= 1
        if remaining == before:
            raise ValueError("the schedule deadlocks")
    return max(free)


def _ready(action: Action, ends: _Ends, num_stages: int) -> Chain | None:
    """Return what makes the input that an action needs of another stage; None if that is ahead."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return ends.get((True, action.stage - 1, action.microbatch))
    gradient = action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)
    if gradient and action.stage < num_stages - 1:
        return ends.get((False, action.stage + 1, action.microbatch))
    return _START
