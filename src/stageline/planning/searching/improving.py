"""Search: try seeds, run the best of them back and forth, then shake what came out.

To place everything backward in time, in the order in which it ended, moves what can wait towards
the end; to place it forward again closes the gaps that this left. Each pass is a schedule of its
own, and often a better one. When passes change nothing any more, the starts of the best schedule
are disturbed a little, and the passes begin anew.

Everything is counted, nothing is timed, and chance comes from a fixed sequence: the same problem
gives the same schedule on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

from stageline.planning.searching.bounds import lower_bound
from stageline.planning.searching.lines import Lines
from stageline.planning.searching.placing import Placed, Priorities, place
from stageline.planning.searching.problem import Metric, Problem, Tick
from stageline.planning.searching.rows import turned_round
from stageline.planning.searching.seeds import Seed
from stageline.scheduling.costs import Number

Figures: TypeAlias = tuple[Tick, Tick]
"""The metric that counts, and the other one, which decides between equals."""

PATIENCES = (4, 2, 3)
"""How long ranks wait for what goes first; the first two tell good seeds from bad ones."""

SETBACKS = 2
"""After so many passes that did not help, passes end."""

FOLLOWED = 4
"""So many seeds are followed up."""

LESS = 8
"""Only so small a part of the effort goes to what decides between equals."""

SHAKES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""By how much starts are disturbed, in units of the longest action."""

MANY_MICROBATCHES = 3
"""So many times the number of ranks are enough to tell good seeds from bad ones."""


@dataclass
class Effort:
    """How many more actions may be placed.

    Attributes:
        left: So many.
    """

    left: int

    def part(self, share: float) -> Effort:
        """Take a share of what is left for a purpose of its own."""
        part = Effort(int(self.left * share))
        self.left -= part.left
        return part

    def give_back(self, part: Effort) -> None:
        """Take over what a part has left."""
        self.left += part.left
        part.left = 0


@dataclass
class Search:
    """The best that was found so far for one problem.

    Attributes:
        problem: What is scheduled.
        metric: What is to be small.
        best: What was found, placed forward in time.
        figures: Its figures.
        source: Who found it.
        bound: What they cannot be below.
    """

    problem: Problem
    metric: Metric
    best: Placed | None = None
    figures: Figures = (float("inf"), float("inf"))
    source: str = "search"
    bound: Figures = field(init=False)

    def __post_init__(self) -> None:
        other: Metric = "T" if self.metric == "span" else "span"
        self._offsets = (self.problem.offsets(self.metric), self.problem.offsets(other))
        self.bound = (
            lower_bound(self.problem, self.metric),
            lower_bound(self.problem, other),
        )
        self._forward = Lines.forward(self.problem)
        # What ends when it must by the one metric, by the other, and half-way between them.
        first, second = self._offsets
        between = [(one + other) // 2 for one, other in zip(first, second, strict=True)]
        self._backward = [
            Lines.reversed(self.problem, offsets) for offsets in (first, between, second)
        ]
        self._drawn = Random(11)

    @property
    def reached(self) -> Number:
        """What the best reaches in the metric that counts."""
        figure = self.figures[0]
        return figure if self.best is None else self.problem.unit.number(figure)

    @property
    def lowest(self) -> Number:
        """What the metric cannot be below."""
        return self.problem.unit.number(self.bound[0])

    def is_over(self, effort: Effort) -> bool:
        """Return whether nothing better is left to find, or no effort to find it."""
        return self.figures <= self.bound or effort.left < self.problem.num_actions

    def try_seeds(
        self, seeds: Iterable[Seed], effort: Effort, *, sure: Iterable[Seed] = ()
    ) -> None:
        """Rank seeds by what they lead to, and follow up the best of them.

        Args:
            seeds: Where to begin.
            effort: What may be spent.
            sure: Seeds that are good enough to be tried on the whole problem, whatever that costs.
        """
        for seed in sure:
            if self.figures <= self.bound:
                break
            priorities = seed(self.problem)
            for patience in PATIENCES[:2]:
                self._pass(self._forward, priorities, patience, effort)
        if self.best is not None:
            self.climb(self.best.starts(), PATIENCES[0], effort)
        small, few = self, MANY_MICROBATCHES * self.problem.num_ranks
        if self.problem.num_microbatches > few:
            small = Search(replace(self.problem, num_microbatches=few), self.metric)
        part = effort.part(0.5)
        tried = list(small._tried(seeds, part))
        effort.give_back(part)
        tried.sort(key=lambda each: each[:3])
        for _, _, patience, seed in tried[:FOLLOWED]:
            self.climb(seed(self.problem), patience, effort)

    def _tried(
        self, seeds: Iterable[Seed], effort: Effort
    ) -> Iterator[tuple[Figures, int, int, Seed]]:
        for number, seed in enumerate(seeds):
            if self.is_over(effort) and self.best is not None:
                return
            priorities = seed(self.problem)
            for patience in PATIENCES[:2]:
                passed = self._pass(self._forward, priorities, patience, effort)
                if passed is not None:
                    yield passed[1], number, patience, seed

    def climb(
        self, priorities: Priorities, patience: int, effort: Effort, *, backward: int = 0
    ) -> None:
        """Pass forward and backward until that no longer helps.

        Args:
            priorities: Where to begin.
            patience: As ``place`` takes it.
            effort: What may be spent.
            backward: Which of the ways to end the passes backward in time go by.
        """
        best: Figures | None = None
        lines, failed = self._forward, 0
        while failed < SETBACKS and not self.is_over(effort):
            passed = self._pass(lines, priorities, patience, effort)
            if passed is None:
                return
            placed, figures = passed
            if best is not None and figures >= best:
                failed += 1
            else:
                best, failed = figures, 0
            priorities = placed.turned()
            lines = self._backward[backward] if lines is self._forward else self._forward

    def shake(self, effort: Effort) -> None:
        """Disturb the best until the effort is spent."""
        if self.figures[0] <= self.bound[0]:
            effort.left //= LESS  # only the other metric is left to improve
        while not self.is_over(effort) and self.best is not None:
            patience = PATIENCES[self._below(len(PATIENCES))]
            backward = self._below(len(self._backward))
            self.climb(self._disturbed(self.best), patience, effort, backward=backward)

    def _pass(
        self, lines: Lines, priorities: Priorities, patience: int, effort: Effort
    ) -> tuple[Placed, Figures] | None:
        effort.left -= self.problem.num_actions
        placed = place(lines, priorities, patience=patience)
        if placed is None:
            return None
        forward = turned_round(placed, self._forward) if lines.is_reversed else placed
        figures = self._figures(forward)
        if figures <= self.figures:
            self.best, self.figures = forward, figures
        return placed, figures

    def learn(self, placed: Placed | None, bound: Tick) -> None:
        """Take over what a solver found, or proved."""
        if placed is not None and self._figures(placed) < self.figures:
            self.best, self.figures, self.source = placed, self._figures(placed), "solver"
        self.bound = (max(bound, self.bound[0]), self.bound[1])

    def _figures(self, placed: Placed) -> Figures:
        first, second = self._offsets
        return (placed.figure(first), placed.figure(second))

    def _below(self, number: int) -> int:
        return int(self._drawn.random() * number)

    def _disturbed(self, placed: Placed) -> Priorities:
        """Return the starts of what was placed, some of them moved."""
        starts, draw = placed.starts(), self._drawn.random
        longest = max(max(row) for row in self.problem.duration)
        by = SHAKES[self._below(len(SHAKES))] * longest
        num_stages, placement = self.problem.num_stages, self.problem.placement
        way = self._below(4)
        if way == 0:
            return [[start + int(draw() * by) for start in row] for row in starts]
        if way == 1:
            moves = [int((draw() - 0.5) * by) for _ in starts]
            return [
                [start + move for start in row] for row, move in zip(starts, moves, strict=True)
            ]
        if way == 2:
            kinds = [int((draw() - 0.5) * by) for _ in self.problem.kinds]
            return [
                [start + kinds[line // num_stages] for start in row]
                for line, row in enumerate(starts)
            ]
        rank = self._below(self.problem.num_ranks)
        end = max(placed.finish)
        begin = draw() * end
        end = begin + draw() * end / 3
        return [
            [start + int((draw() - 0.5) * by) if begin <= start < end else start for start in row]
            if placement[line % num_stages] == rank
            else row
            for line, row in enumerate(starts)
        ]
