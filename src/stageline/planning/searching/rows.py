"""From orders to rows and back: what was placed as a schedule, and when exactly it runs."""

from __future__ import annotations

import numpy as np

from stageline.planning.searching.lines import NO_LINE, Lines
from stageline.planning.searching.placing import Placed
from stageline.planning.searching.problem import Tick
from stageline.scheduling import Kind, Schedule
from stageline.scheduling.schedule import NO_PEER, ROW_DTYPE


def schedule_of(placed: Placed, name: str) -> Schedule:
    """Return what was placed as a schedule."""
    lines = placed.lines
    num_stages = lines.problem.num_stages
    kinds = np.array(lines.kinds, dtype=np.int64)
    rows = []
    for order in placed.orders:
        numbers = np.array(order, dtype=np.int64)
        row = np.empty(len(numbers), dtype=ROW_DTYPE)
        row["kind"], row["stage"] = kinds[numbers // num_stages], numbers % num_stages
        for number in np.unique(numbers):
            chosen = numbers == number
            row["microbatch"][chosen] = np.arange(int(chosen.sum()))
        row["peer"] = NO_PEER
        rows.append(row)
    return Schedule(tuple(rows), name)


def ascending(schedule: Schedule) -> Schedule:
    """Return the same kinds in the same places, every stage's microbatches in turn.

    Microbatches are alike, so none waits longer for that; and the sums of the gradients come out in
    the order of the plain model.

    >>> from stageline.scheduling.schedules import looped_bfs
    >>> print(ascending(looped_bfs(num_stages=2, num_microbatches=2, num_ranks=1)))
    0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1
    """
    rows = []
    for array in schedule.arrays:
        row = array.copy()
        lines = row["stage"].astype(np.int64) * len(Kind) + row["kind"]
        for line in np.unique(lines):
            chosen = lines == line
            row["microbatch"][chosen] = np.sort(row["microbatch"][chosen])
        rows.append(row)
    return Schedule(tuple(rows), schedule.name, schedule.pairs, schedule.replicas)


def turned_round(placed: Placed, forward: Lines) -> Placed:
    """Return what was placed backward in time as it would really run: all as early as it can be."""
    num_stages = forward.problem.num_stages
    last = len(forward.rank) - num_stages
    orders = [
        [last - line + 2 * (line % num_stages) for line in reversed(order)]
        for order in placed.orders
    ]
    return follow(forward, orders)


def follow(lines: Lines, orders: list[list[int]]) -> Placed:
    """Run rows in their order, every action as early as it can be."""
    table = {line[0]: line for of_rank in lines.of_rank for line in of_rank}
    ends: list[list[Tick]] = [[] for _ in lines.rank]
    position, free = [0] * len(orders), list(lines.begin)
    waiting = list(range(len(orders)))
    while waiting:
        rank = waiting.pop()
        order, at, now = orders[rank], position[rank], free[rank]
        while at < len(order):
            line, _, waits, hop, duration, _ = table[order[at]]
            if waits != NO_LINE:
                number = len(ends[line])
                if len(ends[waits]) <= number:
                    break
                now = max(now, ends[waits][number] + hop)
            now += duration
            ends[line].append(now)
            at += 1
            after = lines.following[line]
            if after != NO_LINE and lines.rank[after] != rank:
                waiting.append(lines.rank[after])
        position[rank], free[rank] = at, now
    assert all(at == len(order) for at, order in zip(position, orders, strict=True))
    return Placed(lines, ends, orders, free)
