"""Schedules from a building block: one microbatch laid out in slots, repeated every six of them.

    rank 0   F . . f . B . . b        F  forward of the first stage     stages in a V, as in ZB-V
    rank 1   . F f . B . b .          f  forward of the second          B, b: their input gradients

The distance from F to B decides how many activations a rank holds; the six slots of a microbatch
(F f B b and two weight gradients) fill the steady state. What is left are the ends, where blocks
overhang: there every action moves to the earliest slot that is free, keeps the order of what
depends on each other, and raises no rank's peak. (Qi et al., "Pipeline Parallelism with
Controllable Memory", 2024; the steps are those of the authors' ``zbv_greedy.py``.)

    repeat -> add W in free slots -> move -> squeeze -> drop W, move the end -> squeeze -> add W
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import Integers, lines
from stageline.scheduling.schedules.sizes import check_sizes, ranks_with

PERIOD = 6
W = 4
"""The fifth type of action, after F, f, B and b, which are 0 to 3; a second W is 5."""

Slots: TypeAlias = list[list[int]]
"""For each type of action of one rank, the slot of each microbatch."""

Block: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]
"""Rank and number of ranks -> the slots of F, f, B and b of the first microbatch."""


def from_building_block(
    name: str, block: Block, num_stages: int, num_microbatches: int, num_ranks: int | None
) -> Schedule:
    """Return the schedule that repeats a block for every microbatch."""
    check_sizes(name, num_microbatches=num_microbatches)
    ranks = ranks_with(name, 2, num_stages=num_stages, num_ranks=num_ranks)
    end = PERIOD * num_microbatches
    plan = [
        [list(range(slot, slot + end, PERIOD)) for slot in block(rank, ranks)]
        for rank in range(ranks)
    ]
    plan = _squeezed(_Mover([_with_weights(slots) for slots in plan]).moved())
    plan = [slots[:W] for slots in plan]
    plan = _squeezed([_with_weights(slots) for slots in _Mover(plan).moved()])
    plan = [_with_weights(slots[:W], apart=True) for slots in plan]
    rows = (_row(slots, rank, ranks) for rank, slots in enumerate(plan))
    return Schedule(tuple(rows), name)


def _with_weights(slots: Slots, *, apart: bool = False) -> Slots:
    """Put a weight gradient into each free slot after the first B, and the rest at the end.

    Args:
        slots: F, f, B and b of a rank.
        apart: Whether those of the two stages are types of their own, the second stage's first.
    """
    types = {slot: kind for kind in range(W) for slot in slots[kind]}
    end = max(types) + 1
    pending = [0, 0]
    weights: Slots = [[], []]
    for slot in range(end):
        kind = types.get(slot)
        if kind is None:
            which = 0 if pending[0] else 1
            if pending[which]:
                weights[which].append(slot)
                pending[which] -= 1
        elif kind >= 2:
            pending[kind - 2 if apart else 0] += 1
    for which, count in enumerate(pending):
        weights[which] += range(end, end + count)
        end += count
    return [*slots, *weights] if apart else [*slots, weights[0]]


def _in_order(plan: list[Slots]) -> Iterator[tuple[int, int, int, int]]:
    """Yield slot, rank, type and number of every action, in order of the slots."""
    return iter(
        sorted(
            (slot, rank, kind, number)
            for rank, slots in enumerate(plan)
            for kind, taken in enumerate(slots)
            for number, slot in enumerate(taken)
        )
    )


def _needs(plan: list[Slots], rank: int, kind: int, number: int) -> Iterator[int]:
    """Yield the slots of what an action comes after: of the rank before, and of its own rank."""
    neighbour = rank - 1 if kind in (0, 2) else rank + 1
    if kind < W and 0 <= neighbour < len(plan):
        yield plan[neighbour][kind][number]
    if 0 < kind < W:
        yield plan[rank][kind - 1][number]
    if number > 0:
        yield plan[rank][kind][number - 1]


def _squeezed(plan: list[Slots]) -> list[Slots]:
    """Return the same orders with every action as early as it can be, all of one slot."""
    squeezed: list[Slots] = [[[] for _ in slots] for slots in plan]
    free = [0] * len(plan)
    for _, rank, kind, number in _in_order(plan):
        needed = _needs(squeezed, rank, kind, number)
        slot = max(free[rank], 1 + max(needed, default=-1))
        squeezed[rank][kind].append(slot)
        free[rank] = slot + 1
    return squeezed


@dataclass
class _Profile:
    """How many activations one rank holds after each slot, and what it may hold at most."""

    types: Integers  # of each slot, -1 where it is free
    limit: int
    has_weights: bool

    @property
    def peak(self) -> int:
        held = np.cumsum((self.types == 0) | (self.types == 1))
        if self.has_weights:
            return int((held - np.cumsum(self.types == W)).max())
        # Each free slot takes a pending W, if there is one: a queue, whose length is the sum of
        # what came and went less the lowest that sum ever was.
        came = np.cumsum(self.types >= 2)
        queue: Integers = came - np.cumsum(self.types < 0)
        pending = queue - np.minimum.accumulate(np.minimum(queue, 0))
        return int((held - came + pending).max())

    def move(self, kind: int, origin: int, slot: int) -> bool:
        """Move an action if that raises nothing above the limit; return whether it was."""
        self.types[origin], self.types[slot] = -1, kind
        if (self.has_weights and kind >= 2) or self.peak <= self.limit:
            return True  # where W stands in the slots, it alone lets go, and earlier now
        self.types[origin], self.types[slot] = kind, -1
        return False


class _Mover:
    """Moves what stands before or after the steady state to earlier slots."""

    def __init__(self, plan: list[Slots]) -> None:
        self._plan = plan
        self._has_weights = len(plan[0]) > W
        end = 1 + max(slot for slots in plan for taken in slots for slot in taken)
        self._profiles = [self._profile(slots, end) for slots in plan]
        limit = max(profile.peak for profile in self._profiles)
        for profile in self._profiles:
            profile.limit = limit

    def _profile(self, slots: Slots, end: int) -> _Profile:
        types = np.full(end, -1)
        for kind, taken in enumerate(slots):
            types[taken] = kind
        return _Profile(types, 0, self._has_weights)

    def moved(self) -> list[Slots]:
        """Return the plan with its ends moved; without W the beginning stays as it is."""
        last = len(self._plan[0][0]) - 1
        steady, ending = False, False
        for slot, rank, kind, number in list(_in_order(self._plan)):
            if kind == 3 and rank == 0:
                steady = True
            if steady and not ending:
                ending = kind == 0 and number == last
                continue
            if ending or self._has_weights:
                self._move(slot, rank, kind, number)
        return self._plan

    def _move(self, slot: int, rank: int, kind: int, number: int) -> None:
        profile = self._profiles[rank]
        needed = list(_needs(self._plan, rank, kind, number))
        if kind == W:
            is_backward = (profile.types == 2) | (profile.types == 3)
            needed.append(int(np.flatnonzero(is_backward)[number]))
        earliest = 1 + max(needed, default=-1)
        free = earliest + np.flatnonzero(profile.types[earliest:slot] < 0)
        for candidate in free.tolist():
            if profile.move(kind, slot, candidate):
                self._plan[rank][kind][number] = candidate
                return


def _row(slots: Slots, rank: int, num_ranks: int) -> Row:
    down, up = rank, 2 * num_ranks - 1 - rank
    meanings = [
        (Kind.FORWARD, down),
        (Kind.FORWARD, up),
        (Kind.INPUT_GRADIENT, up),
        (Kind.INPUT_GRADIENT, down),
        (Kind.WEIGHT_GRADIENT, up),
        (Kind.WEIGHT_GRADIENT, down),
    ]
    everything = np.arange(len(slots[0]))
    actions = [lines(kind, np.full_like(everything, at), everything) for kind, at in meanings]
    row: Row = np.concatenate(actions).ravel()[np.argsort(np.concatenate(slots))]
    return row
