"""``find_schedule``: the best schedule for given costs and memory, of those that ship or a new one.

    families   every schedule that ships and fits these stages and ranks is simulated
    search     orders of our own, for every way to place the stages (see ``improving.py``); up to a
               few hundred ranks, for beyond that even one order takes minutes
    solver     on request: an exact solver tries to close what gap is left (see ``exact.py``)

The result is the best of all three, so it is never worse than what ships.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from stageline.errors import ScheduleError
from stageline.planning.bounds import least_time
from stageline.planning.candidates import Candidate as Way
from stageline.planning.candidates import Method
from stageline.planning.searching import exact
from stageline.planning.searching.bounds import lower_bound
from stageline.planning.searching.found import Candidate, Found
from stageline.planning.searching.fusing import fused
from stageline.planning.searching.improving import Effort, Search
from stageline.planning.searching.limits import Limits, PerRank
from stageline.planning.searching.placements import placements_of
from stageline.planning.searching.problem import SPLIT, WHOLE, Metric, Problem, Room
from stageline.planning.searching.rounds import rounds
from stageline.planning.searching.rows import ascending, schedule_of
from stageline.planning.searching.seeds import ONE_BY_ONE, Seed, family_seed, rhythms, rules
from stageline.scheduling import Costs, Kind, Schedule, Simulation, schedules, simulate
from stageline.scheduling.costs import Number
from stageline.scheduling.schedules.sizes import check_sizes, straight_ranks

NAME = "auto"
METRICS = ("T", "span")

EFFORT = 2_000_000
"""How many actions are placed at most; a few seconds for each million."""

MOST_PASSES = 2500
"""How often all actions are placed at most: for small pipelines, long enough."""

MOST_SEARCHED = 500_000
"""Of so many actions at most an order is searched for; above, the families have to do."""

SLOW = ("sequential", "varuna", "v-half", "v-min")
"""Families that take long to build or to simulate: with very many actions only if no other one
fits. All of them save memory and pay with time."""

NUM_RHYTHMS = 40

SHARE = 0.3
"""How much of the effort that is left goes to the seeds of the next placement."""


def find_schedule(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    num_stages: int | None = None,
    placement: str | Sequence[int] | None = None,
    metric: Metric = "T",
    memory_limit: PerRank = None,
    memory_limit_bytes: PerRank = None,
    effort: float = 1.0,
    solver: float | None = None,
) -> Found:
    """Find the best schedule for these costs and this memory.

    The same arguments give the same schedule, on every machine: nothing depends on time.

    >>> found = find_schedule(4, 8, Costs(forward=1, input_gradient=1, weight_gradient=1),
    ...                       memory_limit=6, metric="span")
    >>> print(found.simulation.figures())
    T 27   span 25   bubble 11.1%   peak 6 6 6 6
    >>> found.is_optimal
    True

    Args:
        num_ranks: Workers.
        num_microbatches: Slices of the batch.
        costs: How long everything takes, per stage as placed; all of them 1, and B 2, unless given.
        num_stages: Pieces of the model; unless given, as many as the costs are for, or one per
            rank.
        placement: ``"straight"``, ``"looped"``, ``"v"`` or the rank of every stage; unless given,
            all of them that so many stages allow, and the best is taken.
        metric: ``"T"`` or ``"span"``; between equals the other one decides, then the peak.
        memory_limit: How many activations a rank may hold, in the unit of
            ``Simulation.peak_activations``; one number, or one per rank.
        memory_limit_bytes: The same in bytes, for costs with ``activation_bytes``.
        effort: How long to search, compared with the default.
        solver: For how many seconds, about, OR-tools may try to improve on the search or to prove
            that nothing is better; it needs the extra ``stageline[solver]``.

    Raises:
        ScheduleError: The numbers make no pipeline, or nothing fits into the memory.
    """
    costs = costs or Costs()
    stages = num_stages or _num_stages(costs, num_ranks)
    _check(num_ranks, num_microbatches, stages, metric, effort)
    limits = Limits.of(num_ranks, costs, memory_limit, memory_limit_bytes)
    task = _Task(num_ranks, num_microbatches, stages, costs, metric, limits)
    placements = placements_of(placement, stages, num_ranks)
    room = limits.room(num_ranks, stages, costs)
    faults = {each: limits.too_small(room, each) for each in placements}
    possible = [each for each in placements if not faults[each]]
    pool = _Pool(task)
    pool.take(task.families(set(placements), is_beaten=pool.beats))
    searches = _searched(task, possible, room, pool.reached, effort) if possible else []
    if solver is not None:
        _solve(task, searches, pool.reached, seconds=solver)
    pool.take(task.entry(search) for search in searches if search.best is not None)
    if task.is_large and pool.order is None:
        pool.take(task.families(set(placements), SLOW))
    if pool.order is None:
        wrong = "".join(f"\n- {fault}" for fault in faults[placements[0]])
        raise ScheduleError(f"no schedule fits into the memory: raise the limit.{wrong}")
    bounds = [search.lowest for search in searches]
    if task.whole_is_shorter or not bounds:
        bounds = [task.bound(each, room) for each in placements]
    return _record(task, pool, pool.best(set(placements)), min(bounds))


@dataclass(frozen=True)
class _Entry:
    """A schedule that was looked at."""

    source: str
    simulation: Simulation


Order: TypeAlias = tuple[Number, Number, Number]
"""What makes one schedule better than another: the metric, the other one, the peak."""


@dataclass
class _Pool:
    """The best that fits, and the figures of all.

    Attributes:
        task: What is asked for.
        order: The figures of the best.
        source: Where it comes from.
        kept: The best itself; of large ones, two do not fit into memory, and none is kept.
        ranked: The figures of all: those that fit first, then the better ones.
    """

    task: _Task
    order: Order | None = None
    source: str = ""
    kept: _Entry | None = None
    ranked: list[tuple[bool, Order, Candidate]] = field(default_factory=list)

    @property
    def reached(self) -> Number | None:
        """What the best reaches in the metric that counts."""
        return None if self.order is None else self.order[0]

    def beats(self, name: str) -> bool:
        """Whether a family is not worth the minutes that a large schedule takes."""
        return (
            self.task.is_large and self.order is not None and self.task.least(name) > self.order[0]
        )

    def take(self, entries: Iterable[_Entry]) -> None:
        """Look at some more."""
        for entry in entries:
            fits, order = self.task.limits.fit(entry.simulation), self.task.order(entry)
            self.ranked.append((not fits, order, _candidate(entry, fits)))
            if fits and (self.order is None or order < self.order):
                self.order, self.source = order, entry.source
                self.kept = None if self.task.is_large else entry
            del entry  # before the next one is made

    def best(self, placements: set[tuple[int, ...]]) -> _Entry:
        """Return the best, made anew if it was not kept."""
        return self.kept or next(self.task.families(placements, [self.source]))

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the figures of all, the best first."""
        return tuple(each[-1] for each in sorted(self.ranked, key=lambda each: each[:2]))


@dataclass(frozen=True)
class _Task:
    """What is asked for."""

    num_ranks: int
    num_microbatches: int
    num_stages: int
    costs: Costs
    metric: Metric
    limits: Limits

    def order(self, entry: _Entry) -> Order:
        """Return what makes one schedule better than another."""
        simulation = entry.simulation
        figures = (simulation.T, simulation.span)
        first, second = figures if self.metric == "T" else figures[::-1]
        return first, second, max(simulation.peak_activations)

    @property
    def is_large(self) -> bool:
        """Whether there are too many actions to search among."""
        return len(SPLIT) * self.num_stages * self.num_microbatches > MOST_SEARCHED

    def _promising(self) -> list[str]:
        """Return the families to look at; of large schedules those that may be fastest first."""
        if not self.is_large:
            return list(_trainable())
        return sorted((name for name in _trainable() if name not in SLOW), key=self.least)

    def least(self, name: str) -> Number:
        """Return what the metric of a family cannot be below."""
        method = Method(name, self.num_stages // self.num_ranks)
        candidate = Way(method, 1, self.num_ranks, self.num_microbatches, rows=1)
        return least_time(candidate, self.costs, self.metric)

    def families(
        self,
        placements: set[tuple[int, ...]],
        names: Sequence[str] | None = None,
        is_beaten: Callable[[str], bool] = lambda name: False,
    ) -> Iterator[_Entry]:
        """Yield every schedule that ships, can be run and is for these sizes.

        Args:
            placements: What is allowed.
            names: Which families; all, unless given.
            is_beaten: Whether a family need not be looked at.
        """
        for name in names or self._promising():
            if is_beaten(name):
                continue
            try:
                schedule = schedules.build(
                    name, self.num_stages, self.num_microbatches, num_ranks=self.num_ranks
                )
            except ScheduleError:
                continue  # not for these numbers
            if schedule.placement in placements:
                yield _Entry(name, simulate(ascending(schedule), self.costs))

    def entry(self, search: Search) -> _Entry:
        """Return what a search found."""
        assert search.best is not None
        schedule = schedule_of(search.best, NAME)
        if self.whole_is_shorter:
            schedule = fused(schedule, self.costs)
        return _Entry(search.source, simulate(schedule, self.costs))

    def seeds(self, placement: tuple[int, ...]) -> Iterator[Seed]:
        """Yield where a search may begin."""
        for name in _trainable():
            seed = family_seed(name, placement, self.num_ranks, self.costs)
            if seed is not None:
                yield seed
        yield ONE_BY_ONE
        yield from rules()
        yield from rhythms(NUM_RHYTHMS)

    def problem(
        self, placement: tuple[int, ...], room: Room, kinds: tuple[Kind, ...] = SPLIT
    ) -> Problem:
        """State the problem for one placement."""
        return Problem.of(placement, self.num_microbatches, self.costs, room, kinds)

    @property
    def whole_is_shorter(self) -> bool:
        """Whether a backward in one takes less time than its halves, on some stage."""
        times = (
            self.costs.per_stage(kind, self.num_stages) for kind in (Kind.BACKWARD, *SPLIT[1:])
        )
        return any(whole < first + second for whole, first, second in zip(*times, strict=True))

    def bound(self, placement: tuple[int, ...], room: Room) -> Number:
        """Return what the metric cannot be below, for one placement."""
        costs = _shortest(self.costs, self.num_stages) if self.whole_is_shorter else self.costs
        problem = Problem.of(placement, self.num_microbatches, costs, room)
        return problem.unit.number(lower_bound(problem, self.metric))


def _searched(
    task: _Task, placements: list[tuple[int, ...]], room: Room, known: Number | None, effort: float
) -> list[Search]:
    """Search on every placement a little, and on the most promising one for long.

    Args:
        task: What is asked for.
        placements: Where a search is possible.
        room: What each rank may hold.
        known: What the best of the families reaches; what cannot be below it is not looked at.
        effort: How long, compared with the default.
    """
    if task.is_large:
        return []
    problems = [task.problem(placement, room) for placement in placements]
    if task.whole_is_shorter:
        problems += [task.problem(placement, room, WHOLE) for placement in placements]
    left = Effort(int(effort * min(EFFORT, MOST_PASSES * problems[0].num_actions)))
    searches = [Search(problem, task.metric) for problem in problems]
    searches.sort(key=lambda search: search.lowest)
    for search in searches:
        if search.lowest <= _least(known, searches):
            part = left.part(SHARE)
            problem = search.problem
            search.try_seeds(task.seeds(problem.placement), part, sure=rounds(problem))
            left.give_back(part)
    min(searches, key=lambda search: search.reached).shake(left)
    return searches


def _solve(task: _Task, searches: list[Search], known: Number | None, *, seconds: float) -> None:
    """Let the solver work on all that may hold something better than is known."""
    for search in searches:
        if search.best is None or search.lowest >= _least(known, searches):
            continue
        solved = exact.solve(search.problem, task.metric, search.best, seconds=seconds)
        if solved is not None:
            search.learn(solved.placed, solved.bound)


def _least(known: Number | None, searches: list[Search]) -> Number:
    reached = min(search.reached for search in searches)
    return reached if known is None else min(reached, known)


def _shortest(costs: Costs, num_stages: int) -> Costs:
    """Return costs with which no schedule takes longer, whether it halves backwards or not."""
    whole, first, second = (
        costs.per_stage(kind, num_stages) for kind in (Kind.BACKWARD, *SPLIT[1:])
    )
    inputs = tuple(map(min, whole, first))
    weights = tuple(
        min(weight, full - part) for full, part, weight in zip(whole, inputs, second, strict=True)
    )
    return replace(costs, backward=None, input_gradient=inputs, weight_gradient=weights)


def _record(task: _Task, pool: _Pool, best: _Entry, bound: Number) -> Found:
    simulation = _with_whole_backwards(task, best)
    old = simulation.schedule
    schedule = Schedule(old.arrays, NAME, old.pairs, old.replicas)
    return Found(
        schedule=schedule,
        simulation=replace(simulation, schedule=schedule),
        metric=task.metric,
        source=best.source,
        bound=min(bound, task.order(best)[0]),
        candidates=pool.candidates(),
    )


def _with_whole_backwards(task: _Task, best: _Entry) -> Simulation:
    """Return the same order with whole backwards where halves do not pay."""
    if best.simulation.schedule.pairs or task.is_large:
        return best.simulation
    simulation = simulate(fused(best.simulation.schedule, task.costs), task.costs)
    # Floats may round a sum up that is none the longer.
    is_worse = task.order(_Entry(best.source, simulation)) > task.order(best)
    return best.simulation if is_worse else simulation


def _candidate(entry: _Entry, fits: bool) -> Candidate:
    simulation = entry.simulation
    peak = max(simulation.peak_activations)
    return Candidate(entry.source, simulation.T, simulation.span, peak, fits)


def _trainable() -> Iterator[str]:
    """Yield the families that compute gradients and can be run."""
    for name in schedules.NAMES:
        if name != "forward-only" and schedules.family(name).refusal is None:
            yield name


def _num_stages(costs: Costs, num_ranks: int) -> int:
    """Return for how many stages the costs are, or one per rank if they do not say."""
    given = (costs.forward, costs.backward, costs.input_gradient, costs.weight_gradient)
    return max((len(each) for each in given if isinstance(each, tuple)), default=num_ranks)


def _check(num_ranks: int, num_microbatches: int, stages: int, metric: str, effort: float) -> None:
    check_sizes(NAME, num_microbatches=num_microbatches)
    straight_ranks(NAME, num_stages=stages, num_ranks=num_ranks)
    if metric not in METRICS:
        raise ScheduleError(f"{NAME}: metric={metric!r}: choose one of {', '.join(METRICS)}")
    if effort < 0:
        raise ScheduleError(f"{NAME}: effort={effort}: give 0 or more")
