"""How fast can it be at best? A bound from below for any order of actions, without simulating it.

A rank cannot begin before the first microbatch has come through all stages before it, then it has
all its work to do, and after its last gradient the stages before it still have theirs:

    rank 2        ahead |======== work ========| behind

Weight gradients that may be computed later are work, but nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stageline.planning.candidates import Candidate
from stageline.scheduling import Costs, Kind

if TYPE_CHECKING:  # a search asks for bounds too
    from stageline.planning.searching.problem import Metric

_Times: TypeAlias = NDArray[np.float64]


def least_time(candidate: Candidate, costs: Costs, metric: Metric = "T") -> int:
    """Return what the step takes at least, in the unit of the costs.

    A span begins with a rank's own first forward, so for it only the work of a rank counts.

    Example:
        >>> from stageline.planning.candidates import Method
        >>> costs = Costs(forward=[1, 1, 1, 1], backward=[2, 2, 2, 2])
        >>> least_time(Candidate(Method("1f1b"), 1, 4, 8, rows=1), costs)    # (m + p - 1)(F + B)
        33
        >>> least_time(Candidate(Method("zb-h1"), 1, 4, 8, rows=1), costs)   # F and W hide the rest
        27
    """
    method, count = candidate.method, candidate.num_microbatches
    forward, full, inputs, weights, again = (
        np.array(costs.per_stage(kind, candidate.num_stages), dtype=np.float64)
        for kind in (
            Kind.FORWARD,
            Kind.BACKWARD,
            Kind.INPUT_GRADIENT,
            Kind.WEIGHT_GRADIENT,
            Kind.RECOMPUTE,
        )
    )
    placement = method.placement(candidate.num_ranks)
    hops = _hops(costs, placement)
    backward = np.minimum(full, inputs + weights) if method.splits_backward else full
    handed_on = np.minimum(full, inputs) if method.splits_backward else full
    work = count * (forward + backward)
    urgent = count * (forward + handed_on)
    if method.recompute:
        # Not on the last stage; elsewhere one microbatch may run backward right after its forward.
        again[-1] = 0
        work = work + (count - 1) * again
    if metric == "span":
        return int(_per_rank(work, placement).max())
    first = np.array([placement.index(rank) for rank in range(candidate.num_ranks)])
    ahead = _before(forward[:-1] + hops)[first]
    behind = _before(handed_on[:-1] + hops)[first]
    least = max(
        float((ahead + _per_rank(work, placement)).max()),
        float((ahead + _per_rank(urgent, placement) + behind).max()),
    )
    return int(least)


def least_share(total: int, largest: int, candidate: Candidate) -> int:
    """Return what the step takes at least however the model is cut.

    Args:
        total: The time of all blocks for one microbatch.
        largest: That of the longest.
        candidate: Ranks and microbatches.
    """
    return candidate.num_microbatches * max(total // candidate.num_ranks, largest)


def _hops(costs: Costs, placement: Sequence[int]) -> _Times:
    """Return how long a value takes over each cut."""
    cuts = len(placement) - 1
    return np.array(
        [
            0 if placement[cut] == placement[cut + 1] else costs.hop(cut, cuts, 0, 1)
            for cut in range(cuts)
        ],
        dtype=np.float64,
    )


def _before(times: _Times) -> _Times:
    """Return what lies before each stage, given what each takes until the next has its value."""
    return np.concatenate([[0.0], np.cumsum(times)])


def _per_rank(times: _Times, placement: Sequence[int]) -> _Times:
    return np.bincount(np.array(placement), weights=times).astype(np.float64)
