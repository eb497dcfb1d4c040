"""What no schedule can beat: lower bounds of T and of the span, to know when to stop.

For each rank, four reasons. What it may hold decides how much of its work it can do early, or leave
for later; chains of hops through the other ranks decide how long it must wait at either end.

    work    it begins when the first forward comes, and then has all its work to do
    front   until the first gradient comes back it can only run forwards, as many as it may hold
    back    when its last input gradient is out, only weight gradients are left, as many as it may
            hold; and the gradient still has to reach the first stage
    turn    when its last forward is out, only backwards of what it holds are left; and that
            microbatch still has to go to the last stage and back

This is for any order of one placement within its memory; ``planning/bounds.py`` has the cheaper one
by which whole candidates are dropped, those with R as well.
"""

from __future__ import annotations

from stageline.planning.searching.problem import Metric, Problem, Tick
from stageline.scheduling import Kind

ENDLESS = float("inf")


def lower_bound(problem: Problem, metric: Metric) -> Tick:
    """Return a time that no schedule of this problem can be below, in ticks."""
    offsets = problem.offsets(metric)
    heads, chains = problem.heads(), _Chains(problem, offsets)
    return max(
        _of_rank(problem, rank, heads[rank], offsets[rank], chains)
        for rank in range(problem.num_ranks)
    )


class _Chains:
    """How long one microbatch takes if nothing is in its way."""

    def __init__(self, problem: Problem, offsets: list[Tick]) -> None:
        self.problem = problem
        num_stages = problem.num_stages
        forward, backward = problem.duration[0], problem.duration[1]
        is_split = problem.kinds[-1] is Kind.WEIGHT_GRADIENT
        weight = problem.duration[2] if is_split else (0,) * num_stages
        time: Tick = sum(forward) + sum(there for there, _ in problem.hops)
        # When the first backward of each stage can start.
        self.first_backward: list[Tick] = [0] * num_stages
        for stage in reversed(range(num_stages)):
            self.first_backward[stage] = time
            time += backward[stage] + (problem.hops[stage - 1][1] if stage else 0)
        # From the end of the backward of each stage to the last of what must follow.
        self.after_backward: list[Tick] = []
        longest: Tick = -ENDLESS
        for stage in range(num_stages):
            if stage:
                longest += problem.hops[stage - 1][1] + backward[stage - 1]
            longest = max(longest, weight[stage] + offsets[problem.placement[stage]])
            self.after_backward.append(longest)
        # From the end of the forward of each stage, likewise.
        self.after_forward: list[Tick] = [0] * num_stages
        for stage in reversed(range(num_stages)):
            if stage == num_stages - 1:
                self.after_forward[stage] = backward[stage] + self.after_backward[stage]
            else:
                hop = problem.hops[stage][0] + forward[stage + 1]
                self.after_forward[stage] = hop + self.after_forward[stage + 1]


def _of_rank(problem: Problem, rank: int, head: Tick, offset: Tick, chains: _Chains) -> Tick:
    stages = problem.stages_of(rank)
    count = problem.num_microbatches
    times = [sum(row[stage] for stage in stages) * count for row in problem.duration]
    work = sum(times)
    weights = times[2] if len(times) > 2 else 0
    ahead = min(times[0], _held(problem, rank, 0, 1))
    left_weights = min(weights, _held(problem, rank, 2, 3)) if weights else 0
    left_backwards = min(work - times[0], _left(problem, rank))
    begin = max(head, chains.first_backward[stages[-1]] - ahead)
    # Where all forwards can run before the first gradient comes, the last is not held up by it.
    turning = head if ahead == times[0] else begin
    return max(
        begin + work + offset,
        begin + work - left_weights + chains.after_backward[stages[0]],
        turning + work - left_backwards + chains.after_forward[stages[-1]],
    )


def _held(problem: Problem, rank: int, first: int, last: int) -> Tick:
    """Return how long the actions of some lines take that a rank can hold at once, at most.

    Before the first gradient a forward holds what it took; after the last input gradient a weight
    gradient holds what it will give back.
    """
    limit = problem.limits[rank]
    if limit is None:
        return ENDLESS
    longest: Tick = 0
    for stage in problem.stages_of(rank):
        size = abs(problem.changes[first][stage])
        time = sum(row[stage] for row in problem.duration[first:last])
        if time and not size:
            return ENDLESS
        longest = max(longest, _share(limit, time, size))
    return longest


def _left(problem: Problem, rank: int) -> Tick:
    """Return how long the backwards take of what a rank can hold at once, at most."""
    limit = problem.limits[rank]
    if limit is None:
        return ENDLESS
    longest: Tick = 0
    for stage in problem.stages_of(rank):
        time: Tick = 0
        size: Tick = 0
        for row, changes in zip(problem.duration[:0:-1], problem.changes[:0:-1], strict=True):
            time, size = time + row[stage], size - changes[stage]
            if time and size <= 0:
                return ENDLESS
            longest = max(longest, _share(limit, time, size))
    return longest


def _share(limit: Tick, time: Tick, size: Tick) -> Tick:
    """Return how much work so much room holds, rounded up."""
    if not time:
        return 0
    return -(-limit * time // size) if size else ENDLESS
