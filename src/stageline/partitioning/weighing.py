"""The cuts that make the costliest stage cheapest, and keep every rank within its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stageline.capturing.graph import Cuttable
from stageline.partitioning.amounts import show_bytes
from stageline.partitioning.balance import (
    Problem,
    has_solution,
    running_sum,
    solve,
)
from stageline.partitioning.blocks import Blocks
from stageline.partitioning.budget import Budget, transfer_time
from stageline.partitioning.costs import ModelCosts
from stageline.partitioning.holdings import Holding

Balance = Literal["time", "memory", "parameters"]
BALANCES: tuple[str, ...] = get_args(Balance)

_Holdings = Sequence[Sequence[Holding]]
_FURTHER_STAGES = 64  # so many more are tried before nothing is said to fit


def lightest_cuts(
    graph: Cuttable,
    num_stages: int,
    *,
    by: Balance,
    budget: Budget,
    costs: ModelCosts | None = None,
) -> tuple[list[int], list[str]]:
    """Return how many blocks each stage gets, and what is wrong if the memory does not suffice.

    Args:
        graph: The model.
        num_stages: How many stages.
        by: What is made even.
        budget: What ranks have.
        costs: What blocks cost; the graph's own estimates if None.
    """
    faults = budget.faults(num_stages)
    if faults:
        return [], faults
    blocks = blocks_of(graph, costs, budget, num_stages)
    sizes = _solved(blocks, num_stages, by, budget)
    if sizes is None:
        return [], [_too_little(graph, num_stages, budget, costs)]
    return sizes, []


def blocks_of(graph: Cuttable, costs: ModelCosts | None, budget: Budget, num_stages: int) -> Blocks:
    """Return what the blocks of a graph weigh."""
    if costs is None:
        return Blocks.of_graph(graph)
    return Blocks.of_costs(costs, budget.kinds(num_stages))


def _solved(blocks: Blocks, num_stages: int, by: Balance, budget: Budget) -> list[int] | None:
    """Return the best cuts, None if none keeps the limit.

    Where every rank has one stage, this is exact. Where a rank has several, they share its memory
    in one of several ways, and the best of these is taken.
    """
    holdings = budget.holdings(num_stages)
    problem = _problem(blocks, num_stages, by, budget, holdings)
    if budget.limit is None:
        return solve(problem)
    limit = budget.for_stage(num_stages)
    assert limit is not None
    if limit == budget.limit:
        return solve(_limited(problem, blocks, holdings, [limit] * num_stages))
    found = []
    for limits in _shares(problem, blocks, holdings, budget):
        sizes = solve(problem if limits is None else _limited(problem, blocks, holdings, limits))
        if sizes is not None and max(budget.rank_memory(blocks, sizes)) <= budget.limit:
            found.append((_costliest(problem, sizes), sizes))
    return min(found)[1] if found else None


def _shares(
    problem: Problem, blocks: Blocks, holdings: _Holdings, budget: Budget
) -> Iterator[list[int] | None]:
    """Yield what each stage of a rank may have: anything, an equal share, what it would need."""
    num_stages = problem.num_parts
    share = budget.for_stage(num_stages)
    assert share is not None
    assert budget.limit is not None
    yield None
    yield [share] * num_stages
    placement = budget.placement(num_stages)
    for wanted in (solve(problem), solve(_memory_problem(blocks, holdings))):
        assert wanted is not None  # nothing is limited
        needed = blocks.needed(wanted, holdings)
        total = [0] * (max(placement) + 1)
        for rank, each in zip(placement, needed, strict=True):
            total[rank] += each
        yield [
            budget.limit * each // max(total[rank], 1)
            for rank, each in zip(placement, needed, strict=True)
        ]


def _costliest(problem: Problem, sizes: Sequence[int]) -> int:
    ends = [0, *np.cumsum(sizes).tolist()]
    return max(
        int(problem.heads[part][ends[part + 1]] - problem.tails[part][ends[part]])
        for part in range(len(sizes))
    )


def _problem(
    blocks: Blocks, num_stages: int, by: Balance, budget: Budget, holdings: _Holdings
) -> Problem:
    if by == "memory":
        return _memory_problem(blocks, holdings)
    if by == "parameters":
        sums = running_sum(blocks.parameters)
        return Problem([sums] * num_stages, [sums] * num_stages)
    sums, once = running_sum(blocks.time), blocks.boundary
    placement = budget.placement(num_stages)
    links = [budget.link(*pair) for pair in pairwise(placement)]
    # One table for all cuts that are alike: parts with the same tables are solved faster. At the
    # ends of the model nothing crosses, whatever the table.
    tables = {
        link: np.array([0, *(transfer_time(link, size) for size in blocks.crossing[:-1]), 0])
        for link in {*links, None}
    }
    heads = {link: sums + table + once for link, table in tables.items()}
    tails = {link: sums - table for link, table in tables.items()}
    ends = [heads[link] for link in (*links, links[-1] if links else None)]
    begins = [tails[link] for link in (links[0] if links else None, *links)]
    if not blocks.wants_gradient[0]:  # the first stage splits nothing: it is known where it begins
        table, first = tables[links[0] if links else None], running_sum(blocks.time_in_one)
        ends[0], begins[0] = first + table + blocks.boundary_in_one, first - table
    return Problem(ends, begins)


def _memory_problem(blocks: Blocks, holdings: _Holdings) -> Problem:
    """Return the problem of the fullest stage.

    Where a stage has several moments at which it might hold most, the limit that can just be met
    is found first; cuts are then even by what F keeps.
    """
    fullest = [max(moments, key=lambda each: each.whole) for moments in holdings]
    tables = [blocks.memory(moment) for moment in fullest]
    tables[0] = blocks.memory(fullest[0], splits=blocks.wants_gradient[0])
    problem = Problem([heads for heads, _ in tables], [tails for _, tails in tables])
    if all(len(moments) == 1 for moments in holdings):
        return problem
    least = _least_limit(blocks, holdings)
    return _limited(problem, blocks, holdings, [least] * len(holdings))


def _limited(
    problem: Problem, blocks: Blocks, holdings: _Holdings, limits: Sequence[int]
) -> Problem:
    """Return a problem whose stages also keep a limit of memory each."""
    known: dict[object, NDArray[np.intp]] = {}
    earliest = []
    for stage, (moments, limit) in enumerate(zip(holdings, limits, strict=True)):
        key = (stage == 0, tuple(moments), limit)
        if key not in known:
            known[key] = blocks.earliest_begins(moments, limit, is_first=stage == 0)
        earliest.append(known[key])
    return replace(problem, earliest=earliest)


def _least_limit(blocks: Blocks, holdings: _Holdings) -> int:
    """Return the smallest limit of memory that some cut keeps."""
    free = [np.zeros(len(blocks) + 1, dtype=np.int64)] * len(holdings)
    low = 0
    high = max(blocks.most_needed(moment) for moments in holdings for moment in moments)
    while low < high:
        middle = (low + high) // 2
        limits = [middle] * len(holdings)
        if has_solution(_limited(Problem(free, free), blocks, holdings, limits)):
            high = middle
        else:
            low = middle + 1
    return low


def _too_little(graph: Cuttable, num_stages: int, budget: Budget, costs: ModelCosts | None) -> str:
    """Say how much is missing, and what would fit."""
    assert budget.limit is not None
    limit = budget.for_stage(num_stages)
    assert limit is not None
    blocks = blocks_of(graph, costs, budget, num_stages)
    needed = _least_limit(blocks, budget.holdings(num_stages))
    share = "" if limit == budget.limit else f" ({show_bytes(limit)} for each stage of a rank)"
    short = f"{show_bytes(needed - limit)} too much" if needed > limit else "too much together"
    return (
        f"memory_limit={show_bytes(budget.limit)}{share}: the fullest of {num_stages} stages needs "
        f"{show_bytes(needed)} however they are cut, {short}: "
        f"{_way_out(graph, num_stages, budget, costs)}"
    )


def _way_out(graph: Cuttable, num_stages: int, budget: Budget, costs: ModelCosts | None) -> str:
    """Return what would fit; everything that is named has been tried."""
    ways = []
    stages = _more_stages(graph, num_stages, budget, costs)
    if stages is not None:
        ways.append(f"split={stages}")
    if costs is not None:
        rows = _fewer_rows(graph, num_stages, budget, costs)
        if rows is not None:
            ways.append(f"microbatches of {rows} {'row' if rows == 1 else 'rows'}")
    if _fits_1f1b(graph, num_stages, budget, costs):
        ways.append("schedule='1f1b'")
    if ways:
        return f"{' or '.join(ways)} would fit"
    if costs is None:
        return "no number of stages fits: raise the limit, or use smaller microbatches"
    both = _more_stages(graph, num_stages, budget, costs.at(1))
    if both is not None:
        return f"split={both} with microbatches of 1 row would fit"
    return "no number of stages and no size of microbatches fits: raise the limit"


def _fits_1f1b(graph: Cuttable, num_stages: int, budget: Budget, costs: ModelCosts | None) -> bool:
    is_other = isinstance(budget.schedule, str) and budget.schedule != "1f1b"
    return is_other and _fits(graph, num_stages, replace(budget, schedule="1f1b"), costs)


def _more_stages(
    graph: Cuttable, num_stages: int, budget: Budget, costs: ModelCosts | None
) -> int | None:
    """Return the next larger number of stages that keeps the limit, if there is one."""
    if not isinstance(budget.schedule, str | None):
        return None
    most = min(len(graph.cuts) + 1, num_stages + _FURTHER_STAGES)
    numbers = range(num_stages + 1, most + 1)
    return next((more for more in numbers if _fits(graph, more, budget, costs)), None)


def _fewer_rows(graph: Cuttable, num_stages: int, budget: Budget, costs: ModelCosts) -> int | None:
    """Return the largest smaller size of microbatches that keeps the limit, if there is one."""
    if costs.rows == 1 or not _fits(graph, num_stages, budget, costs.at(1)):
        return None
    low, high = 1, costs.rows
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(graph, num_stages, budget, costs.at(middle)):
            low = middle
        else:
            high = middle
    return low


def _fits(graph: Cuttable, num_stages: int, budget: Budget, costs: ModelCosts | None) -> bool:
    if budget.faults(num_stages):
        return False
    blocks = blocks_of(graph, costs, budget, num_stages)
    return _solved(blocks, num_stages, "time", budget) is not None
