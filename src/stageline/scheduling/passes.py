"""Passes: each takes a schedule and returns a new one; the input is never changed."""

from __future__ import annotations

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Positions, Row, Schedule


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


def recompute_activations(schedule: Schedule) -> Schedule:
    """Return the schedule with an R before every backward whose activations would have to wait.

    What runs backward right after its forward keeps what it has. A pair stays one: its R comes
    before both. A rank that waits for a gradient recomputes meanwhile.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(recompute_activations(one_f_one_b(num_stages=2, num_microbatches=2)))
    0F0 0F1 0R0 0B0 0R1 0B1
    1F0 1B0 1F1 1B1
    """
    schedule = schedule.compute_only()
    pairs = schedule.pairs or (np.empty(0, dtype=np.int64),) * schedule.num_ranks
    rows, moved = [], []
    for row, paired in zip(schedule.arrays, pairs, strict=True):
        again = _waiting(row)
        before = np.where(np.isin(again, paired + 1), again - 1, again)
        added = row[again].copy()
        added["kind"] = Kind.RECOMPUTE
        rows.append(np.insert(row, before, added))
        moved.append(paired + np.searchsorted(before, paired, side="right"))
    return Schedule(tuple(rows), f"{schedule.name} + R", tuple(moved), schedule.replicas)


def _waiting(row: Row) -> Positions:
    """Return where the backwards stand that neither follow their forward nor are recomputed."""
    kind = row["kind"]
    slot = row["stage"].astype(np.int64) << 32 | row["microbatch"]
    gradients = (kind == Kind.BACKWARD) | (kind == Kind.INPUT_GRADIENT)
    follows = np.zeros(len(row), dtype=np.bool_)
    follows[1:] = (kind[:-1] == Kind.FORWARD) & (slot[:-1] == slot[1:])
    known = np.isin(slot, slot[kind == Kind.RECOMPUTE])
    return np.flatnonzero(gradients & ~follows & ~known)
