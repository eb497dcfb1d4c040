"""How long does a schedule take? An exact simulation for stated costs.

The rule: each rank runs its row strictly in order; an action starts as soon as its rank is free
and what it waits for has ended, plus the latency if that ran on another rank. Transfers take
nothing from the rank, so it makes no difference whether the rows contain them. A pair is one
action: it starts when both its halves could, and its forward and its backward end together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from stageline.errors import ScheduleError
from stageline.scheduling.action import Kind
from stageline.scheduling.costs import Costs, Number, number_text
from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.walk import Walk, walk
from stageline.scheduling.work import NOTHING, Work


@dataclass(frozen=True)
class Simulation:
    """When everything happens, and the figures that follow.

    Attributes:
        schedule: What was simulated.
        T: Makespan: from time 0 to the end of the last action of any rank.
        span: The longest time of a rank from its own first forward to its last action. Not T: a
            rank that starts late has a shorter span.
        busy: How long each rank computes.
        bubble: The share of the ranks' time, ``num_ranks * T``, in which they do not compute.
        peak: How many activations each rank holds at most: one more with each F, one less with
            each B or W. Without a backward nothing is kept, and the peak is that of one F. The
            unit is the activations of one microbatch in a rank's share of the model, so that
            schedules compare: of two stages per rank, each counts one half.
        start: When each action starts, per rank, in the order of ``schedule.compute_only()``.
        end: When it ends.
    """

    schedule: Schedule
    T: Number
    span: Number
    busy: tuple[Number, ...]
    bubble: Fraction | float
    peak: tuple[int | Fraction, ...]
    start: tuple[tuple[Number, ...], ...] = field(repr=False)
    end: tuple[tuple[Number, ...], ...] = field(repr=False)

    def figures(self) -> str:
        """Return T, span, bubble and peak on one line."""
        peaks = " ".join(map(number_text, self.peak))
        return (
            f"T {number_text(self.T)}   span {number_text(self.span)}   "
            f"bubble {float(self.bubble):.1%}   peak {peaks}"
        )

    def __str__(self) -> str:
        return f"{title(self.schedule)}\n{self.figures()}"


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Compute when every action starts and ends.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(simulate(one_f_one_b(num_stages=4, num_microbatches=8), Costs(forward=1, backward=2)))
    1f1b: 4 stages on 4 ranks, 8 microbatches
    T 33   span 33   bubble 27.3%   peak 4 3 2 1

    Raises:
        ScheduleError: The schedule deadlocks, or the costs are for another number of stages.
    """
    work = Work.of(schedule)
    times = Times.of(work, walk(work), costs or Costs())
    start, end = (_by_rank(work, flat) for flat in (times.start, times.end))
    makespan = max((row[-1] for row in end if row), default=0)
    busy = tuple(sum(row) for row in _by_rank(work, times.duration))
    return Simulation(
        schedule=schedule,
        T=makespan,
        span=max((_span(work, rank, start, end) for rank in range(schedule.num_ranks)), default=0),
        busy=busy,
        bubble=_bubble(busy, makespan),
        peak=tuple(
            _in_shares(_peak(row, schedule.has_backward), schedule) for row in schedule.arrays
        ),
        start=start,
        end=end,
    )


@dataclass(frozen=True)
class Times:
    """Start, duration and end of each action of a ``Work``."""

    start: list[Number]
    duration: list[Number]
    end: list[Number]

    @classmethod
    def of(cls, work: Work, order: Walk, costs: Costs) -> Times:
        """Apply the rule to the actions, in an order in which they can run."""
        if order.deadlock:
            raise ScheduleError(order.deadlock)
        waits: list[int] = work.waits.tolist()
        before = _before(work)
        lag = _lags(work, costs.latency)
        duration = _durations(work, costs)
        gates = work.gates
        start: list[Number] = [0] * len(waits)
        end: list[Number] = [0] * (len(waits) + 1)  # the extra place is end[NOTHING], time 0
        for index in order.sequence:
            now = end[before[index]]
            ready = end[waits[index]] + lag[index]
            if ready > now:
                now = ready
            if index in gates:
                now = max(now, end[gates[index]] + lag[index + 1])
            start[index] = now
            end[index] = now + duration[index]
        end.pop()
        return cls(start, duration, end)


def title(schedule: Schedule) -> str:
    """Return name and size of a schedule, for people."""
    return (
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks, "
        f"{schedule.num_microbatches} microbatches"
    )


def _before(work: Work) -> list[int]:
    """Return for each action the one before it on its rank, NOTHING for the first."""
    before = np.arange(len(work.rows)) - 1
    firsts = np.array(work.bounds)
    before[firsts[firsts < len(before)]] = NOTHING
    indices: list[int] = before.tolist()
    return indices


def _lags(work: Work, latency: Number) -> list[Number]:
    return [latency if crosses else 0 for crosses in work.crossing().tolist()]


def _durations(work: Work, costs: Costs) -> list[Number]:
    kinds, column = np.unique(work.rows["kind"], return_inverse=True)
    table = [cost for kind in kinds for cost in costs.per_stage(Kind(kind), work.num_stages)]
    places = column * work.num_stages + work.rows["stage"]
    durations = [table[place] for place in places.tolist()]
    for at in work.pairs:
        # The forward takes the time of both, the backward ends with it.
        both = durations[at] + durations[at + 1] if costs.pair is None else costs.pair
        durations[at], durations[at + 1] = both, 0
    return durations


def _by_rank(work: Work, flat: list[Number]) -> tuple[tuple[Number, ...], ...]:
    bounds = work.bounds
    return tuple(tuple(flat[bounds[rank] : bounds[rank + 1]]) for rank in range(len(bounds) - 1))


def _span(
    work: Work,
    rank: int,
    start: tuple[tuple[Number, ...], ...],
    end: tuple[tuple[Number, ...], ...],
) -> Number:
    row = work.rows[work.bounds[rank] : work.bounds[rank + 1]]
    forwards = np.flatnonzero(row["kind"] == Kind.FORWARD)
    return end[rank][-1] - start[rank][int(forwards[0])] if len(forwards) else 0


def _bubble(busy: tuple[Number, ...], makespan: Number) -> Fraction | float:
    total = len(busy) * makespan
    if total == 0:
        return Fraction(0)
    worked = sum(busy)
    if isinstance(total, float) or isinstance(worked, float):
        return 1 - worked / total
    return 1 - Fraction(worked) / total


def _peak(row: Row, has_backward: bool) -> int:
    if not has_backward:
        return min(1, len(row))
    kind = row["kind"]
    release = (kind == Kind.BACKWARD) | (kind == Kind.WEIGHT_GRADIENT)
    change = (kind == Kind.FORWARD).astype(np.int64) - release
    return int(np.cumsum(change).max(initial=0))


def _in_shares(activations: int, schedule: Schedule) -> int | Fraction:
    """Return activations of stages in units of a rank's share of the model."""
    shares = Fraction(activations * schedule.num_ranks, schedule.num_stages or 1)
    return int(shares) if shares.denominator == 1 else shares
