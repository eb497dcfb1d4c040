"""Passes: each takes a schedule and returns a new one; the input is never changed."""

from __future__ import annotations

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.recompute import recompute, recomputed
from stageline.scheduling.schedule import Row, Schedule


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

    What a caller needs who wants all outputs before any gradient exists. Backwards of stages that
    take microbatches first to last then take them last to first: so autograd differentiates the
    plain loop ``torch.cat([model(part) for part in parts])``, and gradients are added in its order.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(forwards_first(one_f_one_b(num_stages=2, num_microbatches=2)))
    0F0 0F1 0B1 0B0
    1F0 1F1 1B1 1B0
    """
    chosen = recomputed(schedule)
    rows = []
    schedule = schedule.compute_only()
    schedule = schedule.keep([row["kind"] != Kind.RECOMPUTE for row in schedule.arrays])
    mirrors = all(_gradients_ascend(row) for row in schedule.arrays)
    for row in schedule.arrays:
        is_forward = row["kind"] == Kind.FORWARD
        backwards = row[~is_forward]
        if mirrors:
            backwards["microbatch"] = schedule.num_microbatches - 1 - backwards["microbatch"]
        rows.append(np.concatenate([row[is_forward], backwards]))
    sorted_rows = Schedule(tuple(rows), schedule.name, replicas=schedule.replicas)
    return recompute(sorted_rows, lambda stage, microbatch: (stage, microbatch) in chosen)


def _gradients_ascend(row: Row) -> bool:
    """Whether each stage of a rank differentiates its microbatches first to last, W too."""
    kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    return all(
        bool(
            (np.diff(row["microbatch"][(row["kind"] == kind) & (row["stage"] == stage)]) > 0).all()
        )
        for kind in kinds
        for stage in set(row["stage"].tolist())
    )
