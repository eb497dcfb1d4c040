"""Where to cut for a schedule: no rank busier than it must be, and none with more than its memory.

With one stage per rank the exact programme of ``balance`` gives the cut whose longest stage is
shortest. With several stages per rank it is the ranks that must be even: that cut is where blocks
begin to move from stage to stage, one at a time, as long as it helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from stageline.partitioning.balance import Problem, running_sum, solve
from stageline.partitioning.blocks import COPIES_OF_PARAMETERS, Blocks
from stageline.partitioning.costs import BlockCosts, ModelCosts
from stageline.partitioning.holdings import Holding, Holdings
from stageline.planning.candidates import Candidate
from stageline.planning.moving import Sizes, improved
from stageline.scheduling import Kind


class Cutter:
    """Cuts one model, for microbatches of one size.

    Args:
        costs: What its blocks cost.
    """

    def __init__(self, costs: ModelCosts) -> None:
        self.costs = costs
        blocks = costs.blocks
        self.num_blocks = len(blocks)
        self._blocks = Blocks.of_costs(costs, ())
        self._halved = Blocks.of_costs(costs, {Kind.INPUT_GRADIENT})
        self._forward = running_sum([x.forward - costs.boundary.forward for x in blocks])
        self._time = running_sum(self._blocks.time)
        self._split = running_sum(self._halved.time)
        self._stage = lru_cache(maxsize=None)(self._joined)
        self._balanced = lru_cache(maxsize=None)(self._balance)

    @cached_property
    def total(self) -> int:
        """The least time of all blocks for one microbatch."""
        least = np.minimum(np.diff(self._time), np.diff(self._split))
        return int(np.maximum(least, 0).sum())

    @cached_property
    def largest(self) -> int:
        """The least time of a stage with the longest block."""
        return int(np.minimum(np.diff(self._time), np.diff(self._split)).max())

    @property
    def fixed_bytes(self) -> int:
        """What the parameters of the whole model take, with gradients and optimizer."""
        return COPIES_OF_PARAMETERS * sum(self._blocks.parameter_bytes)

    def least_fixed(self, num_ranks: int) -> int:
        """Return what the parameters of the fullest rank take at least, however they are shared.

        Of the k largest blocks some rank has a share of k / num_ranks, rounded up; the smallest of
        them at least.
        """
        sizes = sorted(self._blocks.parameter_bytes, reverse=True)
        sums: list[int] = running_sum(sizes).tolist()
        counts = range(1, len(sizes) + 1)
        shares = (sums[count] - sums[count - -(-count // num_ranks)] for count in counts)
        return COPIES_OF_PARAMETERS * max(shares)

    def even(self, candidate: Candidate) -> Sizes:
        """Return how many blocks each stage gets, whatever memory that takes."""
        method = candidate.method
        sizes = self._balanced(candidate.num_stages, method.splits_backward, method.recompute)
        if method.stages_per_rank == 1:
            return sizes
        return self._moved(sizes, candidate)

    def fitting(self, candidate: Candidate, holdings: Holdings, limit: int) -> Sizes:
        """Return the same with as little above a limit of bytes as can be found."""
        begin = self._within(candidate, holdings, limit) or self.even(candidate)
        return self._moved(begin, candidate, holdings, limit)

    def need(self, holdings: Holdings, rank: int, ends: Sequence[int]) -> int:
        """Return the bytes of one rank, parameters and activations, given where stages end."""
        stages = [self._stage(ends[at], ends[at + 1]) for at in holdings.stages[rank]]
        held = holdings.peak(
            rank,
            [
                (
                    stage.input_bytes + stage.activation_bytes,
                    stage.input_bytes,
                    stage.input_gradient_frees,
                )
                for stage in stages
            ],
        )
        return held + sum(stage.parameter_bytes for stage in stages) * COPIES_OF_PARAMETERS

    def _joined(self, begin: int, end: int) -> BlockCosts:
        part = replace(self.costs, blocks=self.costs.blocks[begin:end], others=())
        return part.stages([end - begin])[0]

    def _times(self, num_stages: int, split: bool, recompute: bool) -> list[NDArray[np.int64]]:
        """Return running sums of what blocks take on each stage.

        The first stage splits nothing if nobody waits for the gradient of its input.
        """
        sums = (self._split if split else self._time) + self._forward * recompute
        times = [sums] * num_stages
        if split and not self._blocks.wants_gradient[0]:
            times[0] = self._time + self._forward * recompute
        return times

    def _with_boundary(
        self, times: list[NDArray[np.int64]], split: bool, recompute: bool
    ) -> list[NDArray[np.int64]]:
        """Return the same with what each stage takes beside its blocks."""
        once = (self._halved if split else self._blocks).boundary
        once += self.costs.boundary.forward * recompute
        known = {id(table): table + once for table in times}
        return [known[id(table)] for table in times]

    def _balance(self, num_stages: int, split: bool, recompute: bool) -> Sizes:
        sums = self._times(num_stages, split, recompute)
        if recompute:
            sums[-1] = self._times(num_stages, split, False)[-1]
        sizes = solve(Problem(self._with_boundary(sums, split, recompute), sums))
        assert sizes is not None  # nothing is limited
        return tuple(sizes)

    def _within(self, candidate: Candidate, holdings: Holdings, limit: int) -> Sizes | None:
        """Return the most even cut with an equal share of the limit for each stage of a rank."""
        method = candidate.method
        times = self._times(candidate.num_stages, method.splits_backward, method.recompute)
        share = limit // method.stages_per_rank
        known: dict[tuple[bool, tuple[Holding, ...]], NDArray[np.intp]] = {}
        earliest = []
        for stage, moments in enumerate(holdings.by_stage()):
            key = (stage == 0, moments)
            if key not in known:
                begins = self._blocks.earliest_begins(moments, share, is_first=stage == 0)
                known[key] = begins
            earliest.append(known[key])
        heads = self._with_boundary(times, method.splits_backward, method.recompute)
        sizes = solve(Problem(heads, times, earliest))
        return None if sizes is None else tuple(sizes)

    def _moved(
        self, sizes: Sizes, candidate: Candidate, holdings: Holdings | None = None, limit: int = 0
    ) -> Sizes:
        """Move single blocks between neighbours while that lowers what is too much, or the peak."""
        method = candidate.method
        times = self._times(candidate.num_stages, method.splits_backward, method.recompute)
        ranks = method.placement(candidate.num_ranks)

        def need(rank: int, ends: Sequence[int]) -> int:
            assert holdings is not None
            return max(0, self.need(holdings, rank, ends) - limit)

        return improved(sizes, times, ranks, need if holdings else None)
