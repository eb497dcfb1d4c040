"""A problem laid out for placing actions one by one, forward or backward in time.

Read from its end, a schedule is a schedule of another problem: W comes first and takes the room, I
goes up the stages, F comes last, goes down the stages and gives the room back. So one procedure
fills a pipeline from either end.

    forward    F: from stage s - 1    I: from stage s + 1    W: from I
    reversed   W: free to begin       I: from stage s - 1    F: from stage s + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stageline.planning.searching.problem import Problem, Tick
from stageline.scheduling import Kind

NO_LINE = -1
Line: TypeAlias = tuple[int, int, int, Tick, Tick, Tick]
"""Number, line before it on its stage, line of the other stage that it waits for, hop from there,
duration, and how much of its rank's room is surely enough; 0 where it takes none."""


@dataclass(frozen=True)
class Need:
    """How much room must be free for an action to be placed.

    More than it takes itself: what its microbatch will still take on its stage, and one microbatch
    on each later stage of the rank that holds none. Else a rank could fill up with microbatches
    none of which can go on: in a V, with forwards on the way down that leave no room for any on
    the way up. What microbatches hold that have come to the last stage of the rank counts as free
    for those: they need nothing more and will give it back.

    Attributes:
        own: For the microbatch itself.
        later: For each later stage of the rank: for one microbatch, and the first and last line.
        held: For each stage of the rank: what a microbatch holds, and the last line.
        passed: The first line of the last stage of the rank.
    """

    own: Tick
    later: tuple[tuple[Tick, int, int], ...]
    held: tuple[tuple[Tick, int], ...]
    passed: int

    @property
    def most(self) -> Tick:
        """What is enough whatever the rank holds."""
        return self.own + sum(room for room, _, _ in self.later)

    def exceeds(self, room: Tick, done: Sequence[int]) -> bool:
        """Return whether so much room is too little when so many of each line are done."""
        if self.own > room:
            return True
        wanted = sum(need for need, first, last in self.later if done[first] == done[last])
        passed = done[self.passed]
        coming = sum(
            held * (passed - done[last]) for held, last in self.held if passed > done[last]
        )
        return self.own + wanted > room + coming


@dataclass(frozen=True)
class Lines:
    """The lines of all stages: number ``place * num_stages + stage``, in the order of ``kinds``.

    Attributes:
        problem: What they are lines of.
        kinds: The kinds in the order in which a microbatch passes them, in this direction.
        is_reversed: Whether time runs backward.
        of_rank: The lines of each rank; what moves a microbatch on comes first.
        rank: The rank of each line.
        following: The line of another stage that waits for each, or NO_LINE.
        changes: What an action of each line adds to what its rank holds.
        takers: The lines of each rank whose actions take room, where several compete for it,
            each with the line before it.
        needs: How much room the actions of each of those lines need.
        begin: When each rank is free.
    """

    problem: Problem
    kinds: tuple[Kind, ...]
    is_reversed: bool
    of_rank: tuple[tuple[Line, ...], ...]
    rank: tuple[int, ...]
    following: tuple[int, ...]
    changes: tuple[Tick, ...]
    takers: tuple[tuple[tuple[int, int], ...], ...]
    needs: dict[int, Need]
    begin: tuple[Tick, ...]

    @classmethod
    def forward(cls, problem: Problem) -> Lines:
        """Lay a problem out as it is."""
        return _laid_out(problem, is_reversed=False, begin=[0] * problem.num_ranks)

    @classmethod
    def reversed(cls, problem: Problem, offsets: list[Tick]) -> Lines:
        """Lay a problem out from its end; where ranks may end later than others, they begin so."""
        latest = min(offsets)
        return _laid_out(problem, is_reversed=True, begin=[each - latest for each in offsets])

    @property
    def durations(self) -> list[Tick]:
        """How long an action of each line takes."""
        found: list[Tick] = [0] * len(self.rank)
        for lines in self.of_rank:
            for line in lines:
                found[line[0]] = line[4]
        return found


def _laid_out(problem: Problem, *, is_reversed: bool, begin: list[Tick]) -> Lines:
    step = -1 if is_reversed else 1
    places = range(len(problem.kinds))[::step]
    num_stages = problem.num_stages
    duration = [time for place in places for time in problem.duration[place]]
    changes = [step * change for place in places for change in problem.changes[place]]
    rank = list(problem.placement) * len(places)
    waits = [NO_LINE] * len(rank)
    hops: list[Tick] = [0] * len(rank)
    for position, place in enumerate(places):
        if problem.kinds[place] is Kind.WEIGHT_GRADIENT:
            continue
        is_forward = problem.kinds[place] is Kind.FORWARD
        ascends = is_forward is not is_reversed
        for cut in range(num_stages - 1):
            source, target = (cut, cut + 1) if ascends else (cut + 1, cut)
            waits[position * num_stages + target] = position * num_stages + source
            hops[position * num_stages + target] = problem.hops[cut][0 if is_forward else 1]
    following = [NO_LINE] * len(rank)
    for number, wanted in enumerate(waits):
        if wanted != NO_LINE:
            following[wanted] = number
    needs = _needs(problem, changes)
    of_rank: list[list[Line]] = [[] for _ in begin]
    for number in sorted(range(len(rank)), key=lambda each: _rule(each, num_stages, is_reversed)):
        before = number - num_stages if number >= num_stages else NO_LINE
        enough = needs[number].most if number in needs else 0
        line = (number, before, waits[number], hops[number], duration[number], enough)
        of_rank[rank[number]].append(line)
    takers = [tuple(line[:2] for line in lines if changes[line[0]] > 0) for lines in of_rank]
    return Lines(
        problem=problem,
        kinds=tuple(problem.kinds[place] for place in places),
        is_reversed=is_reversed,
        of_rank=tuple(map(tuple, of_rank)),
        rank=tuple(rank),
        following=tuple(following),
        changes=tuple(changes),
        takers=tuple(found if len(found) > 1 else () for found in takers),
        needs=needs,
        begin=tuple(begin),
    )


def _rule(number: int, num_stages: int, is_reversed: bool) -> tuple[int, int]:
    """Order the lines of a rank by what should come first, all else equal: I (or B), F, W."""
    place, stage = divmod(number, num_stages)
    return (1, 0, 2)[place], stage if is_reversed else -stage


def _needs(problem: Problem, changes: list[Tick]) -> dict[int, Need]:
    """Return what room must be free for an action of each line that takes any."""
    num_stages = problem.num_stages
    last = len(changes) - num_stages

    def most(begin: int) -> Tick:
        held: Tick = 0
        highest: Tick = 0
        for number in range(begin, len(changes), num_stages):
            held += changes[number]
            highest = max(highest, held)
        return highest

    needs = {}
    for number, change in enumerate(changes):
        if change > 0:
            stage = number % num_stages
            held_with = problem.stages_of(problem.placement[stage])
            needs[number] = Need(
                own=most(number),
                later=tuple((most(each), each, each + last) for each in held_with if each > stage),
                held=tuple((-changes[each + last], each + last) for each in held_with),
                passed=held_with[-1],
            )
    return needs
