"""The simulator's inner loop, twice: for few ranks in plain Python, for many in waves of numpy.

Both apply one rule. A rank runs its actions in order; one begins when its rank is free and what it
waits for has ended and travelled for ``lag``. Both give the same ends, to the last bit:

    plain   follows the waits from rank to rank, one action at a time. The reference; takes
            integers of any size
    waves   lets every rank that can go on do one action, all at once. A wave costs the same however
            many ranks take part, so it pays where many do; what is left when few do goes to plain

Neither explains a deadlock: they return None, and ``walk`` finds out who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stageline.scheduling.units import Lookup, Ticks
from stageline.scheduling.work import NOTHING, Integers

WIDE = 40
"""From how many ranks on waves are clearly faster; at about 30 they draw level."""

NARROW = 24
"""A wave costs more than so many actions in plain Python."""

WATCH = 256
"""After so many waves, see whether they are still wide enough."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What the inner loop needs to know, for all actions laid end to end.

    Attributes:
        bounds: Rank r runs the actions ``bounds[r]:bounds[r + 1]``.
        ranks: The rank of each action.
        waits: The action that each waits for, or NOTHING.
        lag: How long what it waits for is on its way.
        duration: How long it takes. In machine numbers only where no sum can overflow.
    """

    bounds: tuple[int, ...]
    ranks: Integers
    waits: Integers
    lag: Lookup
    duration: Lookup


def solve(problem: Problem) -> Ticks | None:
    """Return when each action ends, or None if some never can."""
    is_wide = len(problem.bounds) > WIDE and problem.duration.table.dtype != object
    return waves(problem) if is_wide else plain(problem)


def plain(problem: Problem) -> Ticks | None:
    """Return when each action ends, one action at a time."""
    ends: list[int | float | None] = [None] * len(problem.waits)
    ends.append(0)  # ends[NOTHING]
    if not _follow(problem, ends, clock=[0] * (len(problem.bounds) - 1)):
        return None
    ends.pop()
    return np.array(ends, dtype=problem.duration.table.dtype)


def _follow(
    problem: Problem, ends: list[int | float | None], *, clock: Sequence[int | float]
) -> bool:
    """Fill in the ends that are None; return whether that was possible.

    Where a rank must wait, go to the rank that owes the value, and come back when the value is
    there. The ranks on the way form a trail; it would be longer than there are ranks only if some
    of them waited for each other in a circle.

    Args:
        problem: What runs.
        ends: One for each action, and for whatever else they wait for.
        clock: When each rank is free to begin.
    """
    waits, lag, duration = problem.waits.tolist(), problem.lag.tolist(), problem.duration.tolist()
    rank_of: list[int] = problem.ranks.tolist()
    position, stops, free = list(problem.bounds[:-1]), problem.bounds[1:], list(clock)
    for beginning in range(len(stops)):
        trail, wanted = [beginning], [NOTHING]
        while trail:
            rank = trail[-1]
            index, stop, now = position[rank], stops[rank], free[rank]
            while index < stop:
                ready = ends[waits[index]]
                if ready is None:
                    break
                ready += lag[index]
                if ready > now:
                    now = ready
                now += duration[index]
                ends[index] = now
                index += 1
            position[rank], free[rank] = index, now
            if index == stop or (len(trail) > 1 and ends[wanted[-1]] is not None):
                trail.pop()
                wanted.pop()
                continue
            if len(trail) == len(stops):
                return False
            wanted.append(waits[index])
            trail.append(rank_of[waits[index]])
    return True


def waves(problem: Problem, *, watch: int = WATCH) -> Ticks | None:
    """Return when each action ends, one action of every rank that can go on at a time.

    Args:
        problem: What runs, in machine numbers.
        watch: After so many waves, see whether they are still wide enough.
    """
    waits, lag, duration = problem.waits, problem.lag, problem.duration
    # Times are never negative: -1 says that an action has not run. The extra place is NOTHING.
    ends = np.full(len(waits) + 1, -1, dtype=duration.table.dtype)
    ends[NOTHING] = 0
    position, stops = np.array(problem.bounds[:-1]), np.array(problem.bounds[1:])
    clock = np.zeros(len(position), dtype=ends.dtype)
    wave = num_run = 0
    while True:
        unfinished = position < stops
        if not unfinished.all():
            position, stops, clock = (each[unfinished] for each in (position, stops, clock))
            if not len(position):
                return ends[:-1]
        ready = ends[waits[position]]
        can = np.flatnonzero(ready >= 0)
        if not len(can):
            return None
        index = position[can]
        now = np.maximum(clock[can], ready[can] + lag[index]) + duration[index]
        ends[index] = clock[can] = now
        position[can] += 1
        wave, num_run = wave + 1, num_run + len(can)
        if wave == watch:
            if num_run < NARROW * watch:
                return _finish(problem, ends)
            wave = num_run = 0


def _finish(problem: Problem, ends: Ticks) -> Ticks | None:
    """Run in plain Python what waves have left to do."""
    is_left = ends < 0
    left = np.flatnonzero(is_left)
    wanted = problem.waits[left]
    # Those that wait for something done get a place of their own behind the rest, filled already.
    place = np.cumsum(is_left) - 1
    waits = np.where(is_left[wanted], place[wanted], len(left) + np.arange(len(left)))
    rest = Problem(
        bounds=tuple(np.searchsorted(left, problem.bounds).tolist()),
        ranks=problem.ranks[left],
        waits=waits,
        lag=Lookup(problem.lag.table, problem.lag.which[left]),
        duration=Lookup(problem.duration.table, problem.duration.which[left]),
    )
    rest_ends: list[int | float | None] = [None] * len(left)
    rest_ends += ends[wanted].tolist()
    clock = [_free(ends, begin, stop) for begin, stop in pairwise(problem.bounds)]
    if not _follow(rest, rest_ends, clock=clock):
        return None
    ends[left] = rest_ends[: len(left)]
    return ends[:-1]


def _free(ends: Ticks, begin: int, stop: int) -> int | float:
    """Return when a rank is through with what it has run so far."""
    last: int | float = ends[begin:stop].max(initial=0).item()
    return last
