"""How long does a schedule take, and how much does it hold? An exact simulation for stated costs.

The rule: each rank runs its row strictly in order; an action starts as soon as its rank is free
and what it waits for has ended, plus the time of the hop if that ran on another rank. Transfers
take nothing from the rank, so it makes no difference whether the rows contain them. A fused B
hands on its input gradient when all of it has ended, W included. A pair is one action: it starts
when both its halves could, and its forward and its backward end together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from stageline.scheduling.action import Action, Kind
from stageline.scheduling.costs import Costs, Number, number_text
from stageline.scheduling.critical import CriticalStep, critical_path
from stageline.scheduling.memory import peak_bytes, peak_counts
from stageline.scheduling.schedule import Schedule
from stageline.scheduling.times import Times
from stageline.scheduling.work import Work


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action, and when it runs."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class Simulation:
    """When everything happens, and the figures that follow.

    Two bubbles, for two ways to run. Where every step begins together, a rank that waits for the
    others loses until T. Where the next step may begin on a rank while others are still busy with
    this one, being late is no loss, and only the time within its own span counts. With equal stages
    both are the rate of the zero-bubble papers, ``(cost - work) / cost`` with the work of a rank.

    Attributes:
        schedule: What was simulated.
        T: Makespan: from time 0 to the end of the last action of any rank.
        span: The longest time of a rank from its own first forward to its last action. Not T: a
            rank that starts late has a shorter span.
        busy: How long each rank computes.
        wait: How long each rank waits between its first and its last action.
        bubble: The share of the ranks' time, ``num_ranks * T``, in which they do not compute.
        span_bubble: The share of the span that exceeds the work of the busiest rank.
        peak: How many activations each rank holds at most: one more with each F (R, where it is
            recomputed), one less with each B or W. Without a backward nothing is kept, and the
            peak is 1.
        peak_bytes: The same in bytes, None unless the costs say how large activations are.
    """

    schedule: Schedule
    T: Number
    span: Number
    busy: tuple[Number, ...]
    wait: tuple[Number, ...]
    bubble: Fraction | float
    span_bubble: Fraction | float
    peak: tuple[int, ...]
    peak_bytes: tuple[Number, ...] | None
    times: Times = field(repr=False, compare=False)

    @property
    def idle(self) -> tuple[Number, ...]:
        """How long each rank does not compute: T less the time in which it is busy."""
        return tuple(self.T - busy for busy in self.busy)

    @property
    def peak_activations(self) -> tuple[Number, ...]:
        """The peaks, in activations of one microbatch in ``1 / num_ranks`` of the model.

        One of ``num_ranks`` stages counts 1, one of twice as many counts 1/2: so schedules with
        different numbers of stages can be compared.
        """
        one = Fraction(self.schedule.num_ranks, max(self.schedule.num_stages, 1))
        return tuple(_whole(count * one) for count in self.peak)

    @cached_property
    def start(self) -> tuple[tuple[Number, ...], ...]:
        """When each action starts, per rank, in the order of ``schedule.compute_only()``."""
        return self.times.by_rank(self.times.start)

    @cached_property
    def end(self) -> tuple[tuple[Number, ...], ...]:
        """When each action ends, likewise."""
        return self.times.by_rank(self.times.end)

    @cached_property
    def critical_path(self) -> tuple[CriticalStep, ...]:
        """What T is made of: actions from time 0 to T, each begun because the one before ended."""
        return critical_path(self.times)

    def timeline(self, rank: int) -> tuple[TimedAction, ...]:
        """Return what one rank computes, and when.

        >>> from stageline.scheduling.schedules import one_f_one_b
        >>> for at in simulate(one_f_one_b(num_stages=2, num_microbatches=2)).timeline(0):
        ...     print(at.action, at.start, at.end)
        0F0 0 1
        0F1 1 2
        0B0 4 6
        0B1 7 9
        """
        part = self.times.work.parts()[rank]
        unit = self.times.unit
        return tuple(
            TimedAction(Action(stage, Kind(kind), microbatch), start, end)
            for (kind, stage, microbatch, _), start, end in zip(
                self.times.work.rows[part].tolist(),
                unit.numbers(self.times.start[part]),
                unit.numbers(self.times.end[part]),
                strict=True,
            )
        )

    def picture(self, *, color: bool = False, width: int | None = None) -> str:
        """Draw what every rank does over time; see ``stageline.scheduling.drawing``."""
        from stageline.scheduling.drawing import draw

        return draw(self, color=color, width=width)

    def svg(self) -> str:
        """Draw the same as an SVG picture; see ``stageline.scheduling.svg``."""
        from stageline.scheduling.svg import to_svg

        return to_svg(self)

    def figures(self) -> str:
        """Return T, span, bubble and peak on one line."""
        peaks = " ".join(map(number_text, self.peak_activations))
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
    costs = costs or Costs()
    times = Times.of(Work.of(schedule), costs)
    unit = times.unit
    windows = [_window(times, part) for part in times.work.parts()]
    makespan = unit.number(max(window.end for window in windows))
    span = unit.number(max(window.end - window.first_forward for window in windows))
    busy = tuple(unit.number(window.busy) for window in windows)
    return Simulation(
        schedule=schedule,
        T=makespan,
        span=span,
        busy=busy,
        wait=tuple(unit.number(window.end - window.start - window.busy) for window in windows),
        bubble=_idle_share(sum(busy), len(busy) * makespan),
        span_bubble=_idle_share(max(busy), span),
        peak=peak_counts(schedule),
        peak_bytes=peak_bytes(schedule, costs),
        times=times,
    )


def title(schedule: Schedule) -> str:
    """Return name and size of a schedule, for people."""
    return (
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks, "
        f"{schedule.num_microbatches} microbatches"
    )


@dataclass(frozen=True)
class _Window:
    """From when to when one rank has something to do, in ticks."""

    start: int | float
    first_forward: int | float
    end: int | float
    busy: int | float


def _window(times: Times, part: slice) -> _Window:
    if part.start == part.stop:
        return _Window(0, 0, 0, 0)
    end = times.end[part.stop - 1]
    start = times.start_of(part.start)
    kinds = times.work.rows["kind"][part]
    first = start
    if kinds[0] != Kind.FORWARD:
        forwards = kinds == Kind.FORWARD
        # A row without a forward has no span.
        first = times.start_of(part.start + int(forwards.argmax())) if forwards.any() else end
    return _Window(start, first, end, times.duration[part].sum())


def _idle_share(busy: Number, total: Number) -> Fraction | float:
    if total == 0:
        return Fraction(0)
    if isinstance(total, float) or isinstance(busy, float):
        return 1 - busy / total
    return 1 - Fraction(busy) / total


def _whole(number: Fraction) -> int | Fraction:
    return int(number) if number.denominator == 1 else number
