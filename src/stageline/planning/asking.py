"""What may be asked of the planner: everything that is wrong, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from stageline.errors import ScheduleError
from stageline.partitioning.rows import is_count
from stageline.planning.candidates import divisors, microbatch_counts, runnable
from stageline.planning.searching.problem import Metric
from stageline.scheduling import schedules as families

_MOST_SIZES = 4
"""Of how many sizes of microbatches costs are looked for; those of others lie on lines."""


def question_faults(
    *,
    ranks: object,
    batch_size: object,
    data_parallel: object,
    schedules: object,
    microbatches: object,
    metric: object,
    top: object,
) -> list[str]:
    """Return what is wrong with a question, whatever the model."""
    faults = [
        f"{name}={value!r}: wanted a whole number of at least 1"
        for name, value in (("ranks", ranks), ("batch_size", batch_size), ("top", top))
        if not is_count(value)
    ]
    if metric not in get_args(Metric):
        faults.append(f"metric={metric!r}: wanted 'T' or 'span'")
    faults += _degree_faults(data_parallel, ranks, batch_size)
    faults += _schedule_faults(schedules)
    if microbatches is not None and not _are_counts(microbatches):
        wanted = "a list of whole numbers of at least 1, such as [8, 16]"
        faults.append(f"microbatches={microbatches!r}: wanted {wanted}")
    return faults


def sizes_of_interest(
    *, ranks: int, batch_size: int, data_parallel: int | str, microbatches: Sequence[int] | None
) -> list[int]:
    """Return for which sizes of microbatches costs should be known; a few, smallest first.

    The smallest and the largest are among them, so that no line is drawn beyond what is known.

    Example:
        >>> sizes_of_interest(ranks=4, batch_size=64, data_parallel=1, microbatches=None)
        [1, 2, 8, 16]
    """
    sizes: set[int] = set()
    for degree in divisors(ranks) if data_parallel == "auto" else [int(data_parallel)]:
        rows = -(-batch_size // degree)
        usual = microbatch_counts(rows, ranks // degree)
        counts = usual if microbatches is None else microbatches
        sizes.update(-(-rows // count) for count in counts if count <= rows)
    ordered = sorted(sizes)
    if len(ordered) <= _MOST_SIZES:
        return ordered
    last = len(ordered) - 1
    steps = range(_MOST_SIZES)
    return sorted({ordered[round(last * step / (_MOST_SIZES - 1))] for step in steps})


def _degree_faults(data_parallel: object, ranks: object, batch_size: object) -> list[str]:
    if data_parallel == "auto":
        return []
    if not is_count(data_parallel):
        return [f"data_parallel={data_parallel!r}: wanted 'auto' or a number of at least 1"]
    asked = data_parallel
    faults = []
    if is_count(ranks) and ranks % asked:
        faults.append(f"data_parallel={asked}: it does not divide ranks={ranks}")
    if is_count(batch_size) and batch_size < asked:
        faults.append(f"data_parallel={asked}: a batch of {batch_size} rows has none for some")
    return faults


def _schedule_faults(names: object) -> list[str]:
    if names is None:
        return []
    if not isinstance(names, (list, tuple)) or not names:
        return [f"schedules={names!r}: wanted a list of names, such as ['1f1b', 'zb-v']"]
    return [fault for fault in map(_schedule_fault, names) if fault is not None]


def _schedule_fault(name: object) -> str | None:
    if name in runnable():
        return None
    try:
        refusal = families.family(str(name)).refusal
    except ScheduleError as error:
        return f"schedules: {error}"
    return f"schedules: {refusal or f'{name} does not train: leave it out'}"


def _are_counts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(is_count, value))
