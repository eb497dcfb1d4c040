"""The same problem for an exact solver: OR-tools' CP-SAT, on request and where it is installed.

Every action is an interval. Those of a rank do not overlap; each starts after what it waits for;
what a stage keeps of a microbatch is a second interval, from F to the end of I or W, and those of
a rank never add up to more than it may hold. The solver starts from what the search found, and
either improves on it, or proves that nothing is better, or says how far off it may be.

It counts its work instead of looking at a clock, so it gives the same answer every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageline.errors import ScheduleError
from stageline.planning.searching.lines import Lines
from stageline.planning.searching.placing import Placed
from stageline.planning.searching.problem import Metric, Problem, Tick
from stageline.planning.searching.rows import follow

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntervalVar, IntVar, LinearExpr

NUM_STRATEGIES = 8
"""So many ways to search take turns within the solver; how many cores there are plays no role."""

MOST_ACTIONS = 3000
"""Larger problems are left to the search: the solver would not get anywhere."""


@dataclass(frozen=True)
class Solved:
    """What the solver has to say.

    Attributes:
        placed: The best schedule it knows, None if it found none that is better.
        bound: What the metric cannot be below, in ticks.
    """

    placed: Placed | None
    bound: Tick


def solve(problem: Problem, metric: Metric, start: Placed, *, seconds: float) -> Solved | None:
    """Improve on a schedule, or prove that nothing is better.

    Args:
        problem: What is scheduled.
        metric: What is to be small.
        start: What is known, placed forward in time.
        seconds: How long to try, about: the solver's own count of its work.

    Returns:
        None if the problem is too large, or its times are not whole numbers.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    if problem.unit.per_one is None or problem.num_actions > MOST_ACTIONS:
        return None
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError(
            "the solver needs OR-tools: pip install 'stageline[solver]', or leave it out"
        ) from None
    known = start.figure(problem.offsets(metric))
    model = _Model(cp_model.CpModel(), problem, start)
    figure = model.minimise(metric, known)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = NUM_STRATEGIES
    solver.parameters.interleave_search = True
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model.model)
    bound = round(solver.best_objective_bound)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or solver.value(figure) >= known:
        return Solved(None, min(bound, known))
    return Solved(follow(Lines.forward(problem), model.orders(solver)), bound)


class _Model:
    """A problem in the solver's terms."""

    def __init__(self, model: CpModel, problem: Problem, start: Placed) -> None:
        self.model, self.problem = model, problem
        self._count = problem.num_microbatches
        self._horizon = int(max(start.finish))
        self._starts = self._variables(start)
        self._add_waits()
        for rank in range(problem.num_ranks):
            self._add_rank(rank)

    def _variables(self, start: Placed) -> list[list[IntVar]]:
        """Return a start for every action, line by line, with what is known as a hint."""
        found: list[list[IntVar]] = []
        for row in start.starts():
            variables = [self.model.new_int_var(0, self._horizon, "") for _ in row]
            for variable, value in zip(variables, row, strict=True):
                self.model.add_hint(variable, int(value))
            found.append(variables)
        return found

    def _add_waits(self) -> None:
        lines = Lines.forward(self.problem)
        for line, before, waits, hop, duration, _ in (
            each for of_rank in lines.of_rank for each in of_rank
        ):
            for at in range(self._count):
                start = self._starts[line][at]
                if at:
                    self.model.add(start >= self._starts[line][at - 1] + int(duration))
                for other, lag in ((before, 0), (waits, hop)):
                    if other >= 0:
                        self.model.add(start >= self._end(other, at) + int(lag))

    def _end(self, line: int, at: int) -> LinearExpr:
        place, stage = divmod(line, self.problem.num_stages)
        return self._starts[line][at] + int(self.problem.duration[place][stage])

    def _add_rank(self, rank: int) -> None:
        """Let a rank run one action at a time, and hold no more than it may."""
        problem, model = self.problem, self.model
        stages = problem.stages_of(rank)
        lines = [
            place * problem.num_stages + stage
            for place in range(len(problem.kinds))
            for stage in stages
        ]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(
                start,
                int(problem.duration[line // problem.num_stages][line % problem.num_stages]),
                "",
            )
            for line in lines
            for start in self._starts[line]
        )
        limit = problem.limits[rank]
        if limit is None:
            return
        kept = [
            (self._interval(stage, taken, given, at), size)
            for stage in stages
            for taken, given, size in _holdings([int(row[stage]) for row in problem.changes])
            for at in range(self._count)
        ]
        model.add_cumulative(
            [interval for interval, _ in kept], [size for _, size in kept], int(limit)
        )

    def _interval(self, stage: int, taken: int, given: int, at: int) -> IntervalVar:
        """Return from the start of one action of a stage to the end of another."""
        model, num_stages = self.model, self.problem.num_stages
        size, end = (model.new_int_var(0, self._horizon, "") for _ in range(2))
        model.add(end == self._end(given * num_stages + stage, at))
        return model.new_interval_var(self._starts[taken * num_stages + stage][at], size, end, "")

    def minimise(self, metric: Metric, known: Tick) -> IntVar:
        """Make the metric what is to be small, and return it."""
        problem = self.problem
        offsets = problem.offsets(metric)
        figure = self.model.new_int_var(0, int(known), "")
        for line in range(problem.num_stages * len(problem.kinds)):
            offset = int(offsets[problem.placement[line % problem.num_stages]])
            self.model.add(figure >= self._end(line, self._count - 1) + offset)
        self.model.minimize(figure)
        return figure

    def orders(self, solver: CpSolver) -> list[list[int]]:
        """Return the lines of each rank in the order in which the solver runs their actions."""
        num_stages, placement = self.problem.num_stages, self.problem.placement
        timed: list[list[tuple[int, int]]] = [[] for _ in range(self.problem.num_ranks)]
        for line, variables in enumerate(self._starts):
            rank = placement[line % num_stages]
            timed[rank] += [(solver.value(variable), line) for variable in variables]
        return [[line for _, line in sorted(row)] for row in timed]


def _holdings(changes: list[int]) -> list[tuple[int, int, int]]:
    """Return what a stage keeps: from the start of which action to the end of which, how much.

    >>> _holdings([5, -2, -3]), _holdings([5, 2, -7])
    ([(0, 1, 2), (0, 2, 3)], [(0, 2, 5), (1, 2, 2)])
    """
    if len(changes) > 2 and changes[1] > 0:  # I takes room, too
        kept = [(0, 2, changes[0]), (1, 2, changes[1])]
    else:
        kept = [(0, place, -change) for place, change in enumerate(changes) if place]
    return [each for each in kept if each[2]]
