"""What a search hands back: the schedule, what it reaches, and what else was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from stageline.planning.searching.problem import Metric
from stageline.scheduling import Schedule, Simulation
from stageline.scheduling.costs import Number, number_text
from stageline.wording import aligned


@dataclass(frozen=True)
class Candidate:
    """What one schedule reaches.

    Attributes:
        name: The family, or how it was found.
        T: Its makespan.
        span: Its span.
        peak: The most activations that a rank holds.
        fits: Whether every rank holds no more than it may.
    """

    name: str
    T: Number
    span: Number
    peak: Number
    fits: bool


@dataclass(frozen=True)
class Found:
    """The best schedule that a search found.

    Attributes:
        schedule: It runs, prints and simulates like any other; its name is ``auto``.
        simulation: What it does with the costs of the search.
        metric: What was to be small.
        source: Where it comes from: a family, ``search`` or ``solver``.
        bound: What the metric cannot be below, with these stages on these ranks, for schedules
            that keep what they compute and run one action at a time.
        candidates: What the families and the search reached, the best first.
    """

    schedule: Schedule
    simulation: Simulation
    metric: Metric
    source: str
    bound: Number
    candidates: tuple[Candidate, ...]

    @property
    def reached(self) -> Number:
        """The metric of the schedule."""
        return self.simulation.T if self.metric == "T" else self.simulation.span

    @property
    def gap(self) -> Fraction | float:
        """By which share the schedule may be above the best one; 0 if it is proven best."""
        if self.reached <= self.bound or not self.bound:
            return Fraction(0)
        if isinstance(self.reached, float) or isinstance(self.bound, float):
            return self.reached / self.bound - 1
        return Fraction(self.reached) / Fraction(self.bound) - 1

    @property
    def is_optimal(self) -> bool:
        """Whether no schedule of these stages on these ranks is better."""
        return self.gap == 0

    def verdict(self) -> str:
        """Return on one line where the schedule comes from and how good it is."""
        best = "none is shorter" if self.is_optimal else f"at most {float(self.gap):.2%} above it"
        return (
            f"from {self.source}: {self.metric} {number_text(self.reached)}, "
            f"lower bound {number_text(self.bound)}, {best}"
        )

    def __str__(self) -> str:
        columns = {
            "": [candidate.name for candidate in self.candidates],
            "T": [number_text(candidate.T) for candidate in self.candidates],
            "span": [number_text(candidate.span) for candidate in self.candidates],
            "peak": [number_text(candidate.peak) for candidate in self.candidates],
            "fits": ["yes" if candidate.fits else "no" for candidate in self.candidates],
        }
        return f"{self.verdict()}\n{aligned(columns)}"
