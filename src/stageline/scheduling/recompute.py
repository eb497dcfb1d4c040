"""Recompute: a forward keeps its input alone, and R runs it again before its backward.

    schedule            0F0 0F1 0B0 0B1
    all of it           0F0 0F1 0R0 0B0 0R1 0B1     one graph is alive at a time, not one for each F

An R in a row is all that says so. Executor, check, simulator, picture and memory forecast read it
there, so the passes of this file are the only place that knows the modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Booleans, Positions, Row, Schedule

Recompute = str | Sequence[int] | Callable[[int, int], bool]
"""What to recompute: one of ``MODES``, a list of stages, or ``(stage, microbatch) -> bool``."""

MODES = ("never", "always", "except_last", "waiting")


def insert_recompute(schedule: Schedule, wanted: Recompute) -> Schedule:
    """Return a schedule with the R that were asked for; its own stay.

    ``"except_last"`` keeps the activations of the last microbatch. ``"waiting"`` recomputes what
    would have to wait, and keeps what runs backward right after its forward.

    >>> from stageline.scheduling.schedules import gpipe
    >>> print(insert_recompute(gpipe(num_stages=2, num_microbatches=2), "except_last"))
    0F0 0F1 0R0 0B0 0B1
    1F0 1F1 1R0 1B0 1B1
    """
    if wanted == "never":
        return schedule
    if wanted == "waiting":
        return recompute_activations(schedule)
    if wanted == "always":
        return recompute(schedule, lambda stage, microbatch: True)
    if wanted == "except_last":
        last = schedule.num_microbatches - 1
        return recompute(schedule, lambda stage, microbatch: microbatch < last)
    if callable(wanted):
        return recompute(schedule, wanted)
    stages = frozenset(wanted)
    return recompute(schedule, lambda stage, microbatch: stage in stages)


def recompute_faults(wanted: Any, num_stages: int | None = None) -> list[str]:
    """Return what is wrong with an argument ``recompute=``.

    >>> recompute_faults("always"), recompute_faults([0, 7], num_stages=4)
    ([], ['recompute=[0, 7]: the stages are 0 to 3'])
    """
    if isinstance(wanted, str):
        is_right = wanted in MODES
    elif isinstance(wanted, (list, tuple, range, set, frozenset)):
        is_right = all(isinstance(each, int) and not isinstance(each, bool) for each in wanted)
        if is_right and num_stages is not None and not set(wanted) <= set(range(num_stages)):
            return [f"recompute={wanted!r}: the stages are 0 to {num_stages - 1}"]
    else:
        is_right = callable(wanted)
    if is_right:
        return []
    names = ", ".join(map(repr, MODES))
    return [
        f"recompute={wanted!r}: wanted one of {names}, a list of stages, or a function of a stage "
        "and a microbatch"
    ]


def recompute(schedule: Schedule, wants: Callable[[int, int], bool]) -> Schedule:
    """Return the schedule with an R right before each backward that is wanted so.

    A pair of F and B stays one: its R comes before both. What the schedule recomputes already is
    recomputed once.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> schedule = one_f_one_b(num_stages=2, num_microbatches=2)
    >>> print(recompute(schedule, lambda stage, microbatch: microbatch < 1))
    0F0 0F1 0R0 0B0 0B1
    1F0 1R0 1B0 1F1 1B1

    Args:
        schedule: What to change; transfers are left out.
        wants: ``(stage, microbatch) -> bool``.
    """
    schedule = schedule.compute_only()

    def chosen(row: Row) -> Positions:
        positions = np.flatnonzero(_needs_graph(row))
        pairs = row[["stage", "microbatch"]][positions].tolist()
        wanted = np.array([bool(wants(*pair)) for pair in pairs], dtype=np.bool_)
        return positions[wanted]

    return _with_recompute(schedule, [chosen(row) for row in schedule.arrays])


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
    return _with_recompute(schedule, [_waiting(row) for row in schedule.arrays])


def _with_recompute(schedule: Schedule, chosen: Sequence[Positions]) -> Schedule:
    """Insert an R before the backwards at the given positions of each row."""
    if not any(map(len, chosen)):
        return schedule
    pairs = schedule.pairs or (np.empty(0, dtype=np.int64),) * schedule.num_ranks
    rows, moved = [], []
    for row, paired, again in zip(schedule.arrays, pairs, chosen, strict=True):
        before = np.where(np.isin(again, paired + 1), again - 1, again)
        added = row[again].copy()
        added["kind"] = Kind.RECOMPUTE
        rows.append(np.insert(row, before, added))
        moved.append(paired + np.searchsorted(before, paired, side="right"))
    return Schedule(tuple(rows), f"{schedule.name} + R", tuple(moved), schedule.replicas)


def _needs_graph(row: Row) -> Booleans:
    """Return which actions differentiate what was not recomputed by an R of the row's own."""
    kind, slot = row["kind"], _slot(row)
    gradients = (kind == Kind.BACKWARD) | (kind == Kind.INPUT_GRADIENT)
    needed: Booleans = gradients & ~np.isin(slot, slot[kind == Kind.RECOMPUTE])
    return needed


def _waiting(row: Row) -> Positions:
    """Return where the backwards stand that neither follow their forward nor are recomputed."""
    kind, slot = row["kind"], _slot(row)
    follows = np.zeros(len(row), dtype=np.bool_)
    follows[1:] = (kind[:-1] == Kind.FORWARD) & (slot[:-1] == slot[1:])
    return np.flatnonzero(_needs_graph(row) & ~follows)


def _slot(row: Row) -> Positions:
    """Return one number for each stage and microbatch."""
    slot: Positions = row["stage"].astype(np.int64) << 32 | row["microbatch"]
    return slot


def recomputed(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the stages and microbatches that have an R."""
    return {
        pair
        for row in schedule.arrays
        for pair in row[["stage", "microbatch"]][row["kind"] == Kind.RECOMPUTE].tolist()
    }
