"""The authors' own search for zero-bubble schedules, as seeds: round after round of F and B.

One stage per rank. First a forward on every rank; then as many more as fit before the first
gradient comes back; then, for every microbatch, a sweep of forwards down the ranks and a sweep of
input gradients up again. Weight gradients go where a rank would wait, or must make room. Whether
one also goes where it does not quite fit depends on who has waited most so far: a rank that has
waited less than that may as well wait. Three yes-or-no choices make eight variants. (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023, section 3.1.)

Costs, hops and room may differ from rank to rank here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from stageline.planning.searching.lines import Lines
from stageline.planning.searching.problem import SPLIT, Problem, Tick
from stageline.planning.searching.rows import follow
from stageline.planning.searching.seeds import ONE_BY_ONE, Priorities

F, I, W = range(3)  # noqa: E741  # the lines of a stage, as in the papers


@dataclass(frozen=True)
class Rounds:
    """One of the eight variants.

    Attributes:
        stops_short: Whether the fill ends before a forward would delay the first gradient.
        holds_back: Whether a rank may leave out the forward of a round that would come too late.
        is_greedy: Whether a weight gradient is run where it delays something, though the rank has
            waited less than another.
    """

    stops_short: bool
    holds_back: bool
    is_greedy: bool

    def __call__(self, problem: Problem) -> Priorities:
        """Return when this variant would start every action."""
        orders = _Run(problem, self).orders()
        if orders is None:
            return ONE_BY_ONE(problem)
        return follow(Lines.forward(problem), orders).starts()


def rounds(problem: Problem) -> Iterator[Rounds]:
    """Yield the variants, for a problem that they are for."""
    if problem.kinds == SPLIT and problem.placement == tuple(range(problem.num_ranks)):
        for choices in product((True, False), repeat=3):
            yield Rounds(*choices)


class _Run:
    """How far each rank has come."""

    def __init__(self, problem: Problem, variant: Rounds) -> None:
        ranks = problem.num_ranks
        self.problem, self.variant = problem, variant
        self.last, self.count = ranks - 1, problem.num_microbatches
        self.rows: list[list[int]] = [[] for _ in range(ranks)]
        self.ends: list[list[list[Tick]]] = [[[] for _ in range(ranks)] for _ in range(3)]
        self.free: list[Tick] = [0] * ranks
        self.held: list[Tick] = [0] * ranks
        self.waited: list[Tick] = [0] * ranks

    def orders(self) -> list[list[int]] | None:
        """Return the lines of each rank in order; None if the room is too small for this."""
        self._fill()
        for microbatch in range(1, self.count):
            wanted = self._wanted()
            for rank in range(self.last + 1):
                if wanted[rank] and not self._put_with_weights(rank, F):
                    return None
            for rank in reversed(range(self.last + 1)):
                if self.done(I, rank) == microbatch and not self._put_with_weights(rank, I):
                    return None
        for rank in range(self.last + 1):
            while self.done(W, rank) < self.count:
                self._put(rank, W)
        return self.rows

    def done(self, kind: int, rank: int) -> int:
        return len(self.ends[kind][rank])

    def time(self, kind: int, rank: int) -> Tick:
        return self.problem.duration[kind][rank]

    def fits(self, kind: int, rank: int, held: Tick) -> bool:
        limit = self.problem.limits[rank]
        return limit is None or held + self.problem.changes[kind][rank] <= limit

    def arrival(self, kind: int, rank: int) -> Tick:
        """Return when what the next action of a rank waits for is there."""
        if kind == F and rank > 0:
            return self.ends[F][rank - 1][self.done(F, rank)] + self.problem.hops[rank - 1][0]
        if kind == I and rank < self.last:
            return self.ends[I][rank + 1][self.done(I, rank)] + self.problem.hops[rank][1]
        return 0

    def _put(self, rank: int, kind: int) -> None:
        start = max(self.free[rank], self.arrival(kind, rank))
        if self.rows[rank]:
            self.waited[rank] += start - self.free[rank]
        self.free[rank] = start + self.time(kind, rank)
        self.ends[kind][rank].append(self.free[rank])
        self.held[rank] += self.problem.changes[kind][rank]
        self.rows[rank].append(kind * self.problem.num_stages + rank)

    def _fill(self) -> None:
        """Run the forwards before the first gradient, and that gradient."""
        ranks = range(self.last + 1)
        for rank in ranks:
            self._put(rank, F)
        more = [0] * (self.last + 1)
        back = self.free[self.last] + self.time(I, self.last)
        for rank in reversed(ranks[:-1]):
            back += self.problem.hops[rank][1]
            more[rank], until = self._more(rank, back)
            back = max(until, back) + self.time(I, rank)
        for rank in ranks[1:]:
            # Each rank fewer than the one before it, unless all forwards are out.
            while 0 < more[rank] >= more[rank - 1] and 1 + more[rank] < self.count:
                more[rank] -= 1
        for rank in ranks:
            for _ in range(min(more[rank], self.done(F, rank - 1) - 1 if rank else self.count)):
                self._put(rank, F)
        for rank in reversed(ranks):
            self._put(rank, I)

    def _more(self, rank: int, back: Tick) -> tuple[int, Tick]:
        """Return how many forwards fit before a gradient comes back, and when they end."""
        number, held, time = 0, self.held[rank], self.free[rank]
        while 1 + number < self.count and self.fits(F, rank, held):
            ending = time + self.time(F, rank)
            if ending > back if self.variant.stops_short else time >= back:
                break
            number, held, time = number + 1, held + self.problem.changes[F][rank], ending
        return number, time

    def _wanted(self) -> list[bool]:
        """Return which ranks run a forward in this round; if one does not, none before it does."""
        wanted = [self._wants_forward(rank) for rank in range(self.last + 1)]
        for rank in reversed(range(self.last)):
            wanted[rank] = wanted[rank] and (
                wanted[rank + 1] or self.done(F, rank + 1) >= self.count
            )
        return wanted

    def _wants_forward(self, rank: int) -> bool:
        if self.done(F, rank) >= self.count:
            return False
        is_ahead = rank < self.last and self.done(F, rank) >= self.done(F, rank + 1) + 2
        if not (is_ahead and self.variant.holds_back):
            return True
        times = self.time(F, rank + 1) + self.time(I, rank + 1)
        back = self.free[rank + 1] + times + self.problem.hops[rank][1]
        if self.free[rank] >= back:
            return False
        held, time = self.held[rank], self.free[rank] + self.time(F, rank)
        for _ in range(self.done(I, rank) - self.done(W, rank)):
            if self.fits(F, rank, held):
                break
            held, time = held + self.problem.changes[W][rank], time + self.time(W, rank)
        return time <= back or back - self.free[rank] > max(self.waited) - self.waited[rank]

    def _put_with_weights(self, rank: int, kind: int) -> bool:
        """Run an action, and before it the weight gradients that make room or fill the wait."""
        while not self.fits(kind, rank, self.held[rank]):
            if not self._has_weight(rank):
                return False
            self._put(rank, W)
        arrival = self.arrival(kind, rank)
        while self._has_weight(rank) and self.free[rank] + self.time(W, rank) <= arrival:
            self._put(rank, W)
        gap = arrival - self.free[rank]
        if gap > 0 and self._has_weight(rank):
            spare = max(self.waited) - self.waited[rank]
            if gap > spare or self.variant.is_greedy:
                self._put(rank, W)
        if kind == I and rank == 0 and self.done(F, 0) == self.count:
            while self._has_weight(rank):
                self._put(rank, W)
        self._put(rank, kind)
        return True

    def _has_weight(self, rank: int) -> bool:
        return self.done(W, rank) < self.done(I, rank)
