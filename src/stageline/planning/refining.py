"""The best proposals made better: blocks move, and a schedule is searched for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.errors import ScheduleError
from stageline.planning.bounds import least_time
from stageline.planning.candidates import Candidate, Method
from stageline.planning.evaluating import Evaluator
from stageline.planning.losses import Loss
from stageline.planning.moving import neighbours
from stageline.planning.proposal import Proposal
from stageline.planning.searching import find_schedule
from stageline.scheduling import Schedule

MOVED_ACTIONS = 2_000_000
"""So many actions are simulated for each of the best to see whether blocks should move."""

SEARCHED_ACTIONS = 6_000
"""Up to so many actions a schedule is searched for; with more it takes too long."""

_EFFORT = 0.25
"""Of the search that somebody asks for by itself."""

_WORTH = 0.002
"""A search that cannot gain as much is left out."""


@dataclass(frozen=True)
class Refiner:
    """Makes proposals of candidates, and better ones of good ones.

    Attributes:
        evaluator: Predicts.
        limit: What each rank has, in bytes; None for no limit.
        origin: Where the costs come from.
    """

    evaluator: Evaluator
    limit: int | None
    origin: str

    def proposal(self, candidate: Candidate, sizes: Sequence[int], schedule: Schedule) -> Proposal:
        """Simulate a candidate that is cut so."""
        return Proposal(
            sizes=tuple(sizes),
            placement=candidate.method.placement(candidate.num_ranks),
            schedule=schedule,
            method=candidate.method,
            num_microbatches=candidate.num_microbatches,
            rows=candidate.rows,
            data_parallel=candidate.data_parallel,
            predicted=self.evaluator.predict(candidate, sizes, schedule),
            origin=self.origin,
        )

    def moved(self, proposal: Proposal) -> Proposal:
        """Move single blocks between neighbours as long as the simulated step gets shorter."""
        tries = MOVED_ACTIONS // len(proposal.schedule)
        found = True
        while found:
            found = False
            for sizes in neighbours(proposal.sizes)[:tries]:
                tries -= 1
                other = self.proposal(proposal.candidate, sizes, proposal.schedule)
                if self._fits(other) and order(other) < order(proposal):
                    proposal, found = other, True
                    break
        return proposal

    def _fits(self, proposal: Proposal) -> bool:
        return self.limit is None or max(proposal.predicted.memory) <= self.limit

    def searched(self, method: Method, known: Sequence[Proposal]) -> Proposal | Loss | None:
        """Search for a schedule with the cuts of the best proposal whose stages lie alike.

        None if there is no such proposal.
        """
        alike = [one for one in known if _lie_alike(one.method, method) and not one.recompute]
        if not alike:
            return None
        best = min(alike, key=order)
        candidate = Candidate(
            method, best.data_parallel, best.num_ranks, best.num_microbatches, best.rows
        )
        actions = 3 * candidate.num_stages * candidate.num_microbatches
        if actions > SEARCHED_ACTIONS:
            most = f"{actions:,} actions, at most {SEARCHED_ACTIONS:,}"
            return Loss(candidate, reason=f"not searched: {most}")
        costs = self.evaluator.simulated(candidate, best.sizes)
        beyond = best.predicted.reduction + best.predicted.agreement
        least = least_time(candidate, costs, self.evaluator.metric) / 1e9 + beyond
        if least > (1 - _WORTH) * best.predicted.seconds:
            return Loss(candidate, reason=f"nothing can be faster than {best.method} with its cuts")
        rooms = None
        if self.limit is not None:
            rooms = [self.limit - fixed for fixed in best.predicted.parameter_bytes]
        try:
            found = find_schedule(
                candidate.num_ranks,
                candidate.num_microbatches,
                costs,
                num_stages=candidate.num_stages,
                placement=best.placement,
                metric=self.evaluator.metric,
                memory_limit_bytes=rooms,
                effort=_EFFORT,
            )
        except ScheduleError as error:
            return Loss(candidate, reason=str(error).splitlines()[0])
        proposal = self.proposal(candidate, best.sizes, found.schedule)
        if proposal.predicted.seconds < best.predicted.seconds and self._fits(proposal):
            return proposal
        return Loss(candidate, reason=f"found nothing faster than {best.method}")


def _lie_alike(method: Method, other: Method) -> bool:
    return (method.looks, method.stages_per_rank) == (other.looks, other.stages_per_rank)


def order(proposal: Proposal) -> tuple[float, int, Method]:
    """Faster first; then with less memory; then by name, so that the order never varies."""
    return proposal.predicted.seconds, max(proposal.predicted.memory), proposal.method
