"""How much does each rank hold at most? Prefix sums over its row.

              count form    bytes, of one stage and microbatch
    F         + 1           + activation_bytes
    F, R ..   + 0           + input_bytes                          R will bring the rest
    R         + 1           + activation_bytes - input_bytes
    I           0           - input_gradient_frees
    W         - 1           - activation_bytes + input_gradient_frees
    B         - 1           - activation_bytes

Nothing changes but where an action begins (F, R) or ends (B, I, W), and a rank runs one at a time,
so the order of the row is enough: peaks do not depend on time. What an action needs only while it
runs is not counted. Without a backward nothing is kept, and the peak is that of one microbatch.
"""

from __future__ import annotations

import numpy as np

from stageline.errors import ScheduleError
from stageline.scheduling.action import Kind
from stageline.scheduling.costs import Costs, Number, number_text
from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.units import Ticks, Unit
from stageline.scheduling.work import Booleans

_COUNTS = np.zeros(len(Kind), dtype=np.int64)
_COUNTS[[Kind.FORWARD, Kind.RECOMPUTE]] = 1
_COUNTS[[Kind.BACKWARD, Kind.WEIGHT_GRADIENT]] = -1


def peak_counts(schedule: Schedule) -> tuple[int, ...]:
    """Return how many activations each rank holds at most; each stage has its own.

    >>> from stageline.scheduling.text import parse
    >>> peak_counts(parse("0F0 0F1 0F2 0B0 0B1 0B2")), peak_counts(parse("0F0 0F1 0R0 0B0 0R1 0B1"))
    ((3,), (1,))
    """
    if not schedule.has_backward:
        return tuple(min(1, len(row)) for row in schedule.arrays)
    return tuple(int(_highest(_count_changes(row))) for row in schedule.arrays)


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[Number, ...] | None:
    """Return how many bytes of activations each rank holds at most, None if sizes are not given.

    >>> from stageline.scheduling.text import parse
    >>> costs = Costs(activation_bytes=100, input_bytes=10, input_gradient_frees=30)
    >>> peak_bytes(parse("0F0 0F1 0I0 0W0 0I1 0W1"), costs)
    (200,)
    >>> peak_bytes(parse("0F0 0I0 0F1 0W0 0I1 0W1"), costs)
    (170,)
    >>> peak_bytes(parse("0F0 0F1 0R0 0B0 0R1 0B1"), costs)
    (110,)
    """
    if costs.activation_bytes is None:
        return None
    names = ("activation_bytes", "input_bytes", "input_gradient_frees")
    sizes = [costs.of_stages(name, schedule.num_stages) for name in names]
    _check_parts(*sizes)
    unit = Unit.of(size for part in sizes for size in part)
    longest = max(len(row) for row in schedule.arrays)
    kept, inputs, freed = unit.tables(*sizes, num_terms=longest)
    if not schedule.has_backward:
        peaks = [kept[row["stage"]].max(initial=0) for row in schedule.arrays]
    else:
        peaks = [_highest(_byte_changes(row, kept, inputs, freed)) for row in schedule.arrays]
    return tuple(unit.number(peak) for peak in peaks)


def _check_parts(
    kept: tuple[Number, ...], inputs: tuple[Number, ...], freed: tuple[Number, ...]
) -> None:
    for name, part in (("input_bytes", inputs), ("input_gradient_frees", freed)):
        for stage, (size, whole) in enumerate(zip(part, kept, strict=True)):
            if size > whole:
                raise ScheduleError(
                    f"costs: {name} of stage {stage} is {number_text(size)}, more than its "
                    f"activation_bytes, {number_text(whole)}: it is a part of them"
                )


def _count_changes(row: Row) -> Ticks:
    changes: Ticks = _COUNTS[row["kind"]]
    changes[_recomputed(row) & (row["kind"] == Kind.FORWARD)] = 0
    return changes


def _byte_changes(row: Row, kept: Ticks, inputs: Ticks, freed: Ticks) -> Ticks:
    kind, stage = row["kind"], row["stage"]
    later = (kind == Kind.FORWARD) & _recomputed(row)
    changes = np.zeros(len(row), dtype=kept.dtype)
    for chosen, table in (
        ((kind == Kind.FORWARD) & ~later, kept),
        (later, inputs),
        (kind == Kind.RECOMPUTE, kept - inputs),
        (kind == Kind.INPUT_GRADIENT, -freed),
        (kind == Kind.WEIGHT_GRADIENT, freed - kept),
        (kind == Kind.BACKWARD, -kept),
    ):
        changes[chosen] = table[stage[chosen]]
    return changes


def _recomputed(row: Row) -> Booleans:
    """Return, for each action, whether its stage and microbatch are recomputed in this row."""
    again: Booleans = row["kind"] == Kind.RECOMPUTE
    if not again.any():
        return again
    slot = row["stage"].astype(np.int64) << 32 | row["microbatch"]
    return np.isin(slot, slot[again])


def _highest(changes: Ticks) -> int | float:
    highest: int | float = np.cumsum(changes).max(initial=0)
    return highest
