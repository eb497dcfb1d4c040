"""Which is best? Every candidate that can still win is cut and simulated; the others say why not.

    all candidates          by what they take at least, the most promising first
      1 can it win?         the work of a rank, however the model is cut, against the best so far
      2 cut                 even; bound again, now with the way through the other stages
      3 does it fit?        exactly, by the rows of its schedule; if not, cut for memory
      4 simulate            exactly
    the best few            blocks are moved once more, as long as the simulated time falls
    auto                    a schedule is searched for the best cuts of each placement

The bounds are never above the simulated time, so what they drop could not have won with its cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stageline.errors import ConfigError
from stageline.partitioning.amounts import show_bytes
from stageline.partitioning.costs import ModelCosts
from stageline.partitioning.device import Device
from stageline.planning.asking import question_faults
from stageline.planning.bounds import least_share, least_time
from stageline.planning.candidates import AUTO, Candidate, Method, candidates, divisors, methods
from stageline.planning.evaluating import Evaluator
from stageline.planning.losses import Loss
from stageline.planning.proposal import Proposal
from stageline.planning.proposals import Proposals
from stageline.planning.refining import Refiner, order
from stageline.planning.searching.problem import Metric
from stageline.scheduling import Schedule

_MOST_BUILT = 50_000
"""Of so many microbatches in stages at most schedules are built to tell what would fit."""


def propose(
    costs: ModelCosts,
    *,
    ranks: int,
    batch_size: int,
    device: Device | None = None,
    memory_limit: int | None = None,
    data_parallel: int | Literal["auto"] = 1,
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] | None = None,
    metric: Metric = "T",
    top: int = 5,
) -> Proposals:
    """Return the best ways to run a model of which the costs are known.

    Example:
        >>> from stageline.partitioning.costs import BlockCosts
        >>> block = BlockCosts("layer", 10, 10, 10, 20, 8, 32, 16, 5, 20, 8)
        >>> costs = ModelCosts((block,) * 8, rows=1, origin="by hand")
        >>> found = propose(costs, ranks=4, batch_size=8, schedules=["1f1b", "gpipe", "zb-v"])
        >>> [(str(one.method), one.predicted.T) for one in found]
        [('zb-v x2', 510), ('1f1b', 660), ('gpipe', 660)]

    Args:
        costs: What the blocks cost, for microbatches of any number of rows.
        ranks: How many there are in all.
        batch_size: The rows of a step, of all copies together.
        device: What connects the ranks, and their memory; if left out, that costs nothing.
        memory_limit: What each rank has, in bytes, if not the memory of the device.
        data_parallel: How many copies of the pipeline share the ranks; ``"auto"`` tries all.
        schedules: The names to try; all that can be run if left out.
        microbatches: How many to try; if left out, see ``microbatch_counts``.
        metric: What counts as the time of a step.
        top: How many proposals to return.
    """
    faults = question_faults(
        ranks=ranks,
        batch_size=batch_size,
        data_parallel=data_parallel,
        schedules=schedules,
        microbatches=microbatches,
        metric=metric,
        top=top,
    )
    if faults:
        raise ConfigError("propose", faults)
    if memory_limit is None and device is not None:
        memory_limit = device.memory
    ways = methods(schedules, recompute=memory_limit is not None)
    degrees = divisors(ranks) if data_parallel == "auto" else [data_parallel]
    every = candidates(
        [method for method in ways if method.schedule != AUTO],
        ranks=ranks,
        batch_size=batch_size,
        data_parallel=degrees,
        microbatches=microbatches,
    )
    search = _Search(Refiner(Evaluator(costs, device, metric), memory_limit, costs.origin), top)
    return search.run(list(every), [method for method in ways if method.schedule == AUTO])


@dataclass
class _Search:
    """The best of each method so far, and what was dropped."""

    refiner: Refiner
    top: int
    best: dict[Method, Proposal] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)

    @property
    def evaluator(self) -> Evaluator:
        return self.refiner.evaluator

    @property
    def limit(self) -> int | None:
        return self.refiner.limit

    def run(self, every: Sequence[Candidate], searches: Sequence[Method]) -> Proposals:
        hopeful = []
        for candidate in every:
            reason = self._impossible(candidate)
            if reason is None:
                hopeful.append((self._least(candidate), candidate))
            else:
                self.losses.append(reason)
        for least, candidate in sorted(hopeful, key=lambda each: each[0]):
            self._try(candidate, least)
        return self._proposals(len(every), searches)

    def _impossible(self, candidate: Candidate) -> Loss | None:
        cutter = self.evaluator.cutter(candidate.rows)
        if candidate.num_stages > cutter.num_blocks:
            few = f"{cutter.num_blocks} blocks are too few for {candidate.num_stages} stages"
            return Loss(candidate, reason=few)
        if candidate.refusal is not None:
            return Loss(candidate, reason=f"{candidate.refusal}, m={candidate.num_microbatches}")
        least = cutter.least_fixed(candidate.num_ranks)
        if self.limit is None or least <= self.limit:
            return None
        return Loss(candidate, needs=least, reason=self._too_much("parameters alone need", least))

    def _too_much(self, what: str, needed: int) -> str:
        assert self.limit is not None
        return f"{what} {show_bytes(needed)} of {show_bytes(self.limit)}"

    def _least(self, candidate: Candidate) -> float:
        """Return the seconds of a step at least, however the model is cut."""
        cutter = self.evaluator.cutter(candidate.rows)
        time = least_share(cutter.total, cutter.largest, candidate)
        return time / 1e9 + self.evaluator.least_beyond(candidate)

    def _to_beat(self, method: Method) -> float:
        """Return the seconds that a candidate must stay below to matter."""
        found = sorted(one.predicted.seconds for one in self.best.values())
        last = found[self.top - 1] if len(found) >= self.top else float("inf")
        rivals = (self.best.get(rival) for rival in (method, method.keeping))
        return min([last, *(one.predicted.seconds for one in rivals if one is not None)])

    def _try(self, candidate: Candidate, least: float) -> None:
        """Cut and simulate a candidate, unless it cannot win."""
        evaluator, method = self.evaluator, candidate.method
        if least >= self._to_beat(method):
            self.losses.append(Loss(candidate, least, is_bound=True))
            return
        sizes: Sequence[int] = evaluator.cutter(candidate.rows).even(candidate)
        least = self._least_cut(candidate, sizes)
        if least >= self._to_beat(method):
            self.losses.append(Loss(candidate, least, is_bound=True))
            return
        schedule = evaluator.schedule(method, candidate.num_ranks, candidate.num_microbatches)
        fitted = self._fitted(candidate, sizes, schedule)
        if isinstance(fitted, Loss):
            self.losses.append(fitted)
        else:
            self._keep(self.refiner.proposal(candidate, fitted, schedule))

    def _fitted(
        self, candidate: Candidate, sizes: Sequence[int], schedule: Schedule
    ) -> Sequence[int] | Loss:
        """Return cuts that keep the limit: these, or others; or who needs too much."""
        if self.limit is None:
            return sizes
        needed = self.evaluator.needs(candidate, sizes, schedule)
        if max(needed) > self.limit:
            sizes = self._cut_for_memory(candidate)
            needed = self.evaluator.needs(candidate, sizes, schedule)
        if max(needed) <= self.limit:
            return sizes
        rank = needed.index(max(needed))
        reason = self._too_much(f"rank {rank} needs", max(needed))
        return Loss(candidate, needs=max(needed), reason=reason)

    def _least_cut(self, candidate: Candidate, sizes: Sequence[int]) -> float:
        costs = self.evaluator.simulated(candidate, sizes)
        time = least_time(candidate, costs, self.evaluator.metric)
        return time / 1e9 + self.evaluator.least_beyond(candidate)

    def _cut_for_memory(self, candidate: Candidate) -> Sequence[int]:
        assert self.limit is not None
        holdings = self.evaluator.holdings(
            candidate.method, candidate.num_ranks, candidate.num_microbatches
        )
        return self.evaluator.cutter(candidate.rows).fitting(candidate, holdings, self.limit)

    def _keep(self, proposal: Proposal) -> None:
        """Keep a proposal if it is the best of its method; the other of the two lost."""
        before = self.best.get(proposal.method)
        better = proposal if before is None else min(before, proposal, key=order)
        self.best[proposal.method] = better
        self.losses += [_slower(one) for one in (before, proposal) if one not in (None, better)]

    def _proposals(self, num_candidates: int, searches: Sequence[Method]) -> Proposals:
        useless = [one for one in self.best.values() if self._needs_no_r(one)]
        self.losses += [_slower(self.best.pop(one.method)) for one in useless]
        ranked = sorted(self.best.values(), key=order)
        moved = [self.refiner.moved(one) for one in ranked[: self.top]]
        ranked[: self.top] = moved
        for method in searches:
            searched = self.refiner.searched(method, ranked)
            if isinstance(searched, Proposal):
                ranked.append(self.refiner.moved(searched))
            elif searched is not None:
                self.losses.append(searched)
        ranked.sort(key=order)
        self.losses += [_slower(one) for one in ranked[self.top :]]
        return Proposals(
            tuple(ranked[: self.top]),
            tuple(self.losses),
            num_candidates + len(searches),
            self.evaluator.num_simulated,
            self.limit,
            None if ranked else self._enough(),
        )

    def _enough(self) -> tuple[int, Candidate] | None:
        """Return the least memory with which something would run, of all that was refused for it.

        Of each method the smallest microbatches are looked at.
        """
        smallest: dict[Method, Candidate] = {}
        for candidate in (loss.candidate for loss in self.losses if loss.needs is not None):
            if candidate.num_stages * candidate.num_microbatches <= _MOST_BUILT:
                known = smallest.setdefault(candidate.method, candidate)
                if candidate.rows < known.rows:
                    smallest[candidate.method] = candidate
        needs = ((self._need(candidate), candidate) for candidate in smallest.values())
        return min(needs, key=lambda each: each[0], default=None)

    def _need(self, candidate: Candidate) -> int:
        schedule = self.evaluator.schedule(
            candidate.method, candidate.num_ranks, candidate.num_microbatches
        )
        return max(self.evaluator.needs(candidate, self._cut_for_memory(candidate), schedule))

    def _needs_no_r(self, proposal: Proposal) -> bool:
        """Whether the same schedule is as fast, and fits, without recomputing anything."""
        other = self.best.get(proposal.method.keeping)
        return other not in (None, proposal) and order(other) < order(proposal)


def _slower(proposal: Proposal) -> Loss:
    predicted = proposal.predicted
    return Loss(proposal.candidate, predicted.seconds, bubble=predicted.bubble)
