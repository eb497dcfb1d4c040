"""Where a search begins: ways to say, before anything is placed, what should come first.

    one by one  a microbatch at a time
    rules       by kind alone: backwards first, then forwards, then weight gradients
    families    when a schedule that ships would run each action, for these costs
    rhythms     microbatch after microbatch in a fixed beat, as building blocks do: how fast the
                forward goes down the ranks and the backward comes back, and how long a beat is

Priorities are all a seed gives. Placing makes of them whatever the costs and the room allow, so a
seed that was thought out for other costs or more memory is still worth a try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from stageline.errors import ScheduleError
from stageline.planning.searching.problem import Problem, Tick
from stageline.scheduling import Costs, Kind, schedules, simulate

Priorities: TypeAlias = list[list[Tick]]
Seed: TypeAlias = Callable[[Problem], Priorities]


def rules() -> Iterator[Seed]:
    """Yield the rules by kind: the backward before the forward, and the other way round."""
    yield ByKind((1, 0, 2))
    yield ByKind((0, 1, 2))


@dataclass(frozen=True)
class ByKind:
    """The kinds of action in a fixed order: a number each for F, for I or B, and for W."""

    order: tuple[int, int, int]

    def __call__(self, problem: Problem) -> Priorities:
        """Return the same priority for all actions of a kind."""
        kinds = self.order[: len(problem.kinds)]
        lines = [place for place in kinds for _ in problem.placement]
        return [[place] * problem.num_microbatches for place in lines]


def _one_by_one(problem: Problem) -> Priorities:
    num_stages = problem.num_stages
    ascending = range(num_stages)
    chain = [*ascending, *(2 * num_stages - stage for stage in ascending)]
    chain += [3 * num_stages - stage for stage in ascending]
    count = range(problem.num_microbatches)
    lines = chain[: num_stages * len(problem.kinds)]
    return [[at + 4 * num_stages * each for each in count] for at in lines]


ONE_BY_ONE: Seed = _one_by_one
"""Each microbatch through all stages and back before the next: fits where anything does."""


def family_seed(name: str, placement: tuple[int, ...], num_ranks: int, costs: Costs) -> Seed | None:
    """Return a seed that runs everything when a schedule that ships would.

    Half a backward takes the place of a whole one, and the other way round.

    Args:
        name: The family.
        placement: The rank of every stage.
        num_ranks: Workers.
        costs: How long everything takes.

    Returns:
        None if the family places stages otherwise, or recomputes.
    """
    try:
        one = schedules.fitted(name, len(placement), 1, num_ranks=num_ranks)
    except ScheduleError:
        return None  # not for these numbers
    if one.placement != placement or Kind.RECOMPUTE in one.kinds():
        return None

    def seed(problem: Problem) -> Priorities:
        count = problem.num_microbatches
        schedule = schedules.fitted(name, len(placement), count, num_ranks=num_ranks)
        times = simulate(schedule, costs).times
        known = {
            action[:3]: start
            for action, start in zip(times.work.rows.tolist(), times.start.tolist(), strict=True)
        }
        return _by_times(problem, known)

    return seed


def _by_times(problem: Problem, known: dict[tuple[int, int, int], Tick]) -> Priorities:
    halves = {Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}
    rows: Priorities = []
    for kind in problem.kinds:
        for stage in range(problem.num_stages):
            row = []
            for microbatch in range(problem.num_microbatches):
                start = known.get((kind, stage, microbatch))
                if start is None:
                    other = Kind.BACKWARD if kind in halves else Kind.INPUT_GRADIENT
                    start = known[other, stage, microbatch]
                row.append(start)
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Rhythm:
    """A beat for every microbatch.

    Attributes:
        down: For each time the stages pass all ranks, by how much the forward is slower than it
            could be; the last number stands for all further passes.
        up: The same for the backward.
        rests: How much of a beat passes between forward and backward, and where the stages turn.
        beat: How long a beat is, compared with the work of the busiest rank.
    """

    down: tuple[float, ...]
    up: tuple[float, ...]
    rests: tuple[float, float]
    beat: float

    def __call__(self, problem: Problem) -> Priorities:
        """Return when the rhythm would start every action."""
        num_stages = problem.num_stages
        beat = self.beat * max(_work(problem, rank) for rank in range(problem.num_ranks))
        passes = _passes(problem.placement)
        forward: list[float] = [0.0] * num_stages
        backward: list[float] = [0.0] * num_stages
        time = 0.0
        for stage in range(num_stages):
            forward[stage] = time
            there, turns = _step(problem, stage, 0)
            slow = self.down[min(passes[stage], len(self.down) - 1)]
            time += there + self.rests[1] * beat if turns else there * slow
        time = forward[-1] + problem.duration[0][-1] + self.rests[0] * beat
        for stage in reversed(range(num_stages)):
            backward[stage] = time
            back, turns = _step(problem, stage, 1)
            slow = self.up[min(passes[stage], len(self.up) - 1)]
            time += back + self.rests[1] * beat if turns else back * slow
        weights = [begin + long for begin, long in zip(backward, problem.duration[1], strict=True)]
        begins = (forward, backward, weights)[: len(problem.kinds)]
        count = range(problem.num_microbatches)
        return [[int(begin + beat * each) for each in count] for row in begins for begin in row]


def rhythms(number: int) -> Iterator[Rhythm]:
    """Yield some rhythms, the same ones whenever asked."""
    drawn = Random(7)

    def slower(by: float, often: float) -> float:
        return 1 + drawn.random() * by if drawn.random() < often else 1.0

    for _ in range(number):
        yield Rhythm(
            down=(slower(3, 0.7), slower(2, 0.4)),
            up=(slower(2, 0.4), slower(3, 0.7)),
            rests=(slower(0.5, 0.5) - 1, slower(0.5, 0.5) - 1),
            beat=slower(0.6, 0.7),
        )


def _work(problem: Problem, rank: int) -> Tick:
    return sum(row[stage] for row in problem.duration for stage in problem.stages_of(rank))


def _passes(placement: tuple[int, ...]) -> list[int]:
    """Return for each stage how often the stages have passed the ranks before."""
    passes: list[int] = []
    seen: set[int] = set()
    number = 0
    for stage, rank in enumerate(placement):
        if rank in seen and rank != placement[stage - 1]:
            number, seen = number + 1, set()
        seen.add(rank)
        passes.append(number)
    return passes


def _step(problem: Problem, stage: int, way: int) -> tuple[Tick, bool]:
    """Return how long an action and the hop after it take, and whether its rank goes on."""
    long = problem.duration[way][stage]
    cut = stage if way == 0 else stage - 1
    if not 0 <= cut < problem.num_stages - 1:
        return long, False
    here, there = problem.placement[cut], problem.placement[cut + 1]
    return long + problem.hops[cut][way], here == there
