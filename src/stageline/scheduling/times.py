"""When does every action start and end? Costs and waits in, one array of times out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stageline.errors import ScheduleError
from stageline.scheduling.action import Kind
from stageline.scheduling.costs import Costs, Number
from stageline.scheduling.kernels import Problem, solve
from stageline.scheduling.units import Lookup, Ticks, Unit
from stageline.scheduling.walk import walk
from stageline.scheduling.work import MISSING, NOTHING, Integers, Work


@dataclass(frozen=True, eq=False)
class Times:
    """When each action of a ``Work`` runs, in ticks.

    Attributes:
        work: The actions.
        unit: What a tick is worth.
        lag: How long what each action waits for is on its way.
        duration: How long each action takes.
        end: When it ends.
    """

    work: Work
    unit: Unit
    lag: Lookup
    duration: Lookup
    end: Ticks

    @classmethod
    def of(cls, work: Work, costs: Costs) -> Times:
        """Apply the rule of the simulator.

        Raises:
            ScheduleError: The schedule deadlocks, or the costs are for another one.
        """
        if (work.waits == MISSING).any():
            raise ScheduleError(walk(work).deadlock)
        which, durations = _durations(work, costs)
        if work.pairs:
            which, durations = _paired(work, costs, which, durations)
        hop, hops = _hops(work, costs)
        unit = Unit.of([*durations, *hops])
        long, far = unit.tables(durations, hops, num_terms=len(which))
        duration, lag = Lookup(long, which), Lookup(far, hop)
        problem = Problem(work.bounds, work.ranks, work.waits, lag, duration)
        end = _solve_gated(problem, work.gates) if work.gates else solve(problem)
        if end is None:
            raise ScheduleError(walk(work).deadlock)
        return cls(work, unit, lag, duration, end)

    @cached_property
    def start(self) -> Ticks:
        """When each action starts: its rank is free, and what it waits for has come."""
        end = np.append(self.end, np.zeros(1, dtype=self.end.dtype))  # the extra place is NOTHING
        before = np.arange(len(self.work.rows)) - 1
        firsts = np.array(self.work.bounds)
        before[firsts[firsts < len(before)]] = NOTHING
        starts: Ticks = np.maximum(end[before], end[self.work.waits] + self.lag[:])
        for index in self.work.gates:
            starts[index] = max(starts[index], self.arrival(index)[0])
        return starts

    def start_of(self, index: int) -> int | float:
        """Return when one action starts, without computing all of them."""
        return max(self.free(index), self.arrival(index)[0])

    def free(self, index: int) -> int | float:
        """Return when the rank has ended what it does before an action."""
        is_first = index in self._firsts
        free: int | float = 0 if is_first else self.end[index - 1]
        return free

    def arrival(self, index: int) -> tuple[int | float, int]:
        """Return when what an action waits for has come, and the action that it is for.

        That is the action itself, but for the forward of a pair: it also waits for the input of
        its backward, and so for the later of two.
        """
        halves = (index, index + 1) if index in self.work.gates else (index,)
        return max((self._arrival(half), half) for half in halves)

    def _arrival(self, index: int) -> int | float:
        wanted = self.work.waits[index]
        arrival: int | float = 0 if wanted == NOTHING else self.end[wanted] + self.lag[index]
        return arrival

    @cached_property
    def _firsts(self) -> frozenset[int]:
        return frozenset(self.work.bounds)

    def by_rank(self, ticks: Ticks) -> tuple[tuple[Number, ...], ...]:
        """Cut an array for all actions into numbers for each rank."""
        return tuple(self.unit.numbers(ticks[part]) for part in self.work.parts())


def _solve_gated(problem: Problem, gates: dict[int, int]) -> Ticks | None:
    """Solve a problem with pairs: a moment before each forward waits for its backward's input."""
    at = np.array(sorted(gates))
    moments = at + np.arange(len(at))  # where they stand once they are put in

    def moved(indices: Integers) -> Integers:
        return np.where(indices >= 0, indices + np.searchsorted(at, indices, side="right"), indices)

    owed = moved(np.array([gates[index] for index in at.tolist()]))
    lag, duration = problem.lag, problem.duration
    bounds = np.array(problem.bounds)
    nothing = int(np.flatnonzero(duration.table == 0)[0])
    end = solve(
        Problem(
            bounds=tuple((bounds + np.searchsorted(at, bounds)).tolist()),
            ranks=np.insert(problem.ranks, at, problem.ranks[at]),
            waits=np.insert(moved(problem.waits), at, owed),
            lag=Lookup(lag.table, np.insert(lag.which, at, lag.which[at + 1])),
            duration=Lookup(duration.table, np.insert(duration.which, at, nothing)),
        )
    )
    return None if end is None else np.delete(end, moments)


def _durations(work: Work, costs: Costs) -> tuple[Integers, list[Number]]:
    """Return which of a table of durations each action has; the table, by kind in use and stage."""
    kind = work.rows["kind"]
    used = np.flatnonzero(np.bincount(kind, minlength=len(Kind))).tolist()
    offset = np.zeros(len(Kind), dtype=np.int32)
    offset[used] = np.arange(len(used)) * work.num_stages
    table = [cost for each in used for cost in costs.per_stage(Kind(each), work.num_stages)]
    return offset[kind] + work.rows["stage"], table


def _paired(
    work: Work, costs: Costs, which: Integers, durations: list[Number]
) -> tuple[Integers, list[Number]]:
    """Give the forward of each pair the time of both; the backward ends with it."""
    which, table = which.copy(), [*durations, 0]
    nothing = len(durations)
    known: dict[tuple[int, int], int] = {}
    for at in work.pairs:
        halves = (int(which[at]), int(which[at + 1]))
        if halves not in known:
            known[halves] = len(table)
            both = durations[halves[0]] + durations[halves[1]]
            table.append(both if costs.pair is None else costs.pair)
        which[at], which[at + 1] = known[halves], nothing
    return which, table


def _hops(work: Work, costs: Costs) -> tuple[Integers, list[Number]]:
    """Return which hop each action waits for, and how long each takes; hop 0 is none."""
    crosses = work.crossing()
    num_cuts = work.num_stages - 1
    if costs.hops_are_alike:
        return crosses.view(np.uint8), [0, costs.hop(0, num_cuts, 0, 0)]
    used = np.flatnonzero(crosses)
    made = work.waits[used]
    stage = work.rows["stage"]
    ranks = len(work.bounds) - 1
    cuts = np.minimum(stage[used], stage[made]).astype(np.int64)
    ways = (cuts * ranks + work.ranks[made]) * ranks + work.ranks[used]
    distinct, way = np.unique(ways, return_inverse=True)
    hops = np.zeros(len(crosses), dtype=np.int32)
    hops[used] = way + 1
    return hops, [
        0,
        *(
            costs.hop(each // ranks**2, num_cuts, each // ranks % ranks, each % ranks)
            for each in distinct.tolist()
        ),
    ]
