"""Passes: each takes a schedule and returns a new one; the input is never changed."""

from __future__ import annotations

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Schedule


def keep_microbatches(schedule: Schedule, count: int) -> Schedule:
    """Return the schedule for a batch that gives fewer microbatches: the later ones are left out.

    Leaving actions out never adds a wait, so what could run before still can.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(keep_microbatches(one_f_one_b(num_stages=2, num_microbatches=8), 2))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    return schedule.keep([row["microbatch"] < count for row in schedule.arrays])


def forward_part(schedule: Schedule) -> Schedule:
    """Return the forwards alone, each rank's in the order it had: evaluation and inference.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(forward_part(one_f_one_b(num_stages=2, num_microbatches=2)))
    0F0 0F1
    1F0 1F1
    """
    return schedule.keep([row["kind"] == Kind.FORWARD for row in schedule.arrays])


def forwards_first(schedule: Schedule) -> Schedule:
    """Return the same actions, all forwards of a rank before all else it does.

    What a caller needs who wants all outputs before any gradient exists.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(forwards_first(one_f_one_b(num_stages=2, num_microbatches=2)))
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """
    rows = []
    for row in schedule.compute_only().arrays:
        is_forward = row["kind"] == Kind.FORWARD
        rows.append(np.concatenate([row[is_forward], row[~is_forward]]))
    return Schedule(tuple(rows), schedule.name, replicas=schedule.replicas)
