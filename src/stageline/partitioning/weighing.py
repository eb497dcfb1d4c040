"""What stages cost, by the graph's estimates, and the cuts that make the costliest cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from stageline.capturing.graph import Cuttable, Load
from stageline.partitioning.amounts import show_bytes
from stageline.partitioning.balance import Problem, has_solution, running_sum, solve

Balance = Literal["time", "memory", "parameters"]
BALANCES: tuple[str, ...] = get_args(Balance)

# A nominal link of 10 GB/s. What crosses a cut is sent forward, and its gradient back; sender and
# receiver are both busy with it.
BYTES_PER_NANOSECOND = 10
TRIPS = 2

# Weights, their gradient, and the two moments of Adam.
COPIES_OF_PARAMETERS = 4


@dataclass(frozen=True)
class Budget:
    """The memory of a rank.

    Attributes:
        limit: Bytes; None for as much as it takes.
        num_ranks: How many ranks share the stages; None for one per stage.
    """

    limit: int | None = None
    num_ranks: int | None = None

    def for_stage(self, num_stages: int) -> int | None:
        """Return what each stage may have where a rank holds several: an equal share."""
        if self.limit is None or self.num_ranks is None:
            return self.limit
        return self.limit // -(-num_stages // self.num_ranks)


def stage_memory(load: Load, stage: int, num_stages: int) -> int:
    """Return the bytes that a stage needs at most under 1F1B.

    It keeps the activations of as many microbatches as there are stages from it to the last.
    """
    kept = load.activation_bytes * (num_stages - stage)
    return load.parameter_bytes * COPIES_OF_PARAMETERS + kept


def transfer_time(graph: Cuttable, position: int) -> int:
    """Return the nanoseconds that a cut at a position costs each of its two stages."""
    crossing = sum(value.num_bytes for value in graph.crossing(position))
    return crossing * TRIPS // BYTES_PER_NANOSECOND


def lightest_cuts(
    graph: Cuttable, num_stages: int, *, by: Balance, budget: Budget
) -> tuple[list[int], list[str]]:
    """Return how many blocks each stage gets, and what is wrong if the memory does not suffice."""
    ends = [0, *graph.cuts, graph.num_nodes]
    loads = [graph.load(begin, end) for begin, end in pairwise(ends)]
    limit = budget.for_stage(num_stages)
    memory = _memory_problem(loads, num_stages)
    problem = memory if by == "memory" else _cost_problem(graph, ends, loads, num_stages, by)
    if limit is not None:
        problem = Problem(problem.heads, problem.tails, memory.heads, limit)
    sizes = solve(problem)
    if sizes is None:
        assert limit is not None
        return [], [_too_little(loads, num_stages, budget, limit)]
    return sizes, []


def _cost_problem(
    graph: Cuttable, ends: Sequence[int], loads: Sequence[Load], num_stages: int, by: Balance
) -> Problem:
    if by == "parameters":
        sums = running_sum([load.parameters for load in loads])
        return Problem([sums] * num_stages, [sums] * num_stages)
    sums = running_sum([load.time for load in loads])
    inner = [transfer_time(graph, position) for position in ends[1:-1]]
    crossing = np.array([0, *inner, 0], dtype=np.int64)
    return Problem([sums + crossing] * num_stages, [sums - crossing] * num_stages)


def _memory_problem(loads: Sequence[Load], num_stages: int) -> Problem:
    fixed = running_sum([load.parameter_bytes * COPIES_OF_PARAMETERS for load in loads])
    kept = running_sum([load.activation_bytes for load in loads])
    sums = [fixed + kept * (num_stages - stage) for stage in range(num_stages)]
    return Problem(sums, sums)


def _too_little(loads: Sequence[Load], num_stages: int, budget: Budget, limit: int) -> str:
    """Say how much is missing, and what would fit."""
    sizes = solve(_memory_problem(loads, num_stages))
    assert sizes is not None  # nothing is limited here
    needed = max(memory_of(loads, sizes))
    assert budget.limit is not None
    share = "" if limit == budget.limit else f" ({show_bytes(limit)} for each stage of a rank)"
    fitting = _smallest_fitting(loads, num_stages, budget)
    if fitting is not None:
        way_out = f"split={fitting} would fit"
    else:
        way_out = "no number of stages fits: raise the limit, or use smaller microbatches"
    return (
        f"memory_limit={show_bytes(budget.limit)}{share}: the fullest of {num_stages} stages needs "
        f"{show_bytes(needed)} however they are cut, {show_bytes(needed - limit)} too much: "
        f"{way_out}"
    )


def memory_of(loads: Sequence[Load], sizes: Sequence[int]) -> list[int]:
    """Return the bytes of each stage that consists of so many blocks."""
    needed, first = [], 0
    for stage, size in enumerate(sizes):
        part = loads[first : first + size]
        needed.append(sum(stage_memory(load, stage, len(sizes)) for load in part))
        first += size
    return needed


def _smallest_fitting(loads: Sequence[Load], num_stages: int, budget: Budget) -> int | None:
    """Return the next larger number of stages that keeps the limit, if there is one."""
    for more in range(num_stages + 1, min(len(loads), num_stages + 64) + 1):
        memory = _memory_problem(loads, more)
        share = budget.for_stage(more)
        assert share is not None
        if has_solution(Problem(memory.heads, memory.tails, memory.heads, share)):
            return more
    return None
