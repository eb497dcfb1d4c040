"""Make one B of an I and the W right after it, wherever nobody waits for the I that long.

Two halves pay only where something comes between them or where the gradient is wanted early. All
else may run as one: that costs nothing in simulation, and less on a machine.
"""

from __future__ import annotations

import numpy as np

from stageline.scheduling import Costs, Kind, Schedule, simulate
from stageline.scheduling.schedule import Row
from stageline.scheduling.times import Times


def fused(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the same order with fewer halves; no action starts later than before.

    >>> from stageline.scheduling import schedules
    >>> print(fused(schedules.zb_h1(num_stages=2, num_microbatches=2), Costs()))
    0F0 0F1 0B0 0B1
    1F0 1I0 1F1 1I1 1W0 1W1
    """
    times = simulate(schedule, costs).times
    joined = _joined(times, costs)
    rows = []
    for part in times.work.parts():
        row: Row = times.work.rows[part].copy()
        first = joined[part]
        row["kind"][first] = Kind.BACKWARD
        second = np.append(False, first[:-1]) if len(first) else first
        rows.append(row[~second])
    return Schedule(tuple(rows), schedule.name)


def _joined(times: Times, costs: Costs) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each action, whether it is an I that can be one B with the W after it."""
    work = times.work
    rows = work.rows
    joined = np.zeros(len(rows), dtype=bool)
    if len(rows) < 2:
        return joined
    now, after = rows[:-1], rows[1:]
    joined[:-1] = (
        (now["kind"] == Kind.INPUT_GRADIENT)
        & (after["kind"] == Kind.WEIGHT_GRADIENT)
        & (now["stage"] == after["stage"])
        & (now["microbatch"] == after["microbatch"])
        & (work.ranks[:-1] == work.ranks[1:])
        & _not_longer(costs, work.num_stages)[now["stage"]]
    )
    # The W ends when the B would: whoever waits for the I must begin later than that.
    waiting = np.flatnonzero(work.waits >= 0)
    wanted = work.waits[waiting]
    soon = (
        times.start[waiting] - times.lag[waiting] < times.end[np.minimum(wanted + 1, len(rows) - 1)]
    )
    joined[wanted[soon]] = False
    return joined


def _not_longer(costs: Costs, num_stages: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    whole, first, second = (
        costs.per_stage(kind, num_stages)
        for kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    )
    return np.array([b <= i + w for b, i, w in zip(whole, first, second, strict=True)])
