"""How much a stage holds of its microbatches at a time, as the rows of a schedule say.

1F1B, stage 0 of 3      F0 F1 F2 B0 F3 B1 ..        three whole activations
ZB-H1                   F0 F1 F2 I0 F3 W0 ..        two whole ones and one that is half released
with R                  F0 F1 F2 R2 B2 ..           two inputs and one whole one
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stageline.scheduling import Kind, Schedule
from stageline.scheduling.schedule import Row


@dataclass(frozen=True)
class Holding:
    """How many microbatches a stage holds at one moment, by what it holds of them.

    Attributes:
        whole: All that F keeps.
        halved: What I has not released.
        inputs: The input alone; R will bring the rest.
    """

    whole: int
    halved: int = 0
    inputs: int = 0


def holdings_of(schedule: Schedule) -> list[tuple[Holding, ...]]:
    """Return for each stage the moments at which it holds most; one is enough where none is less.

    Example:
        >>> from stageline.scheduling import schedules
        >>> holdings_of(schedules.one_f_one_b(3, 8))
        [(Holding(whole=3, halved=0, inputs=0),), (Holding(whole=2, halved=0, inputs=0),), \
(Holding(whole=1, halved=0, inputs=0),)]
    """
    if not schedule.has_backward:
        return [(Holding(1),)] * schedule.num_stages
    found: dict[int, tuple[Holding, ...]] = {}
    for row in schedule.arrays:
        for stage in np.unique(row["stage"]).tolist():
            found[stage] = _most(row[row["stage"] == stage])
    return [found[stage] for stage in range(schedule.num_stages)]


def holdings_of_1f1b(num_stages: int) -> list[tuple[Holding, ...]]:
    """Return what 1F1B holds with microbatches enough, one stage per rank."""
    return [(Holding(num_stages - stage),) for stage in range(num_stages)]


_CHANGES = {  # of whole, halved and inputs
    Kind.FORWARD: (1, 0, 0),
    Kind.BACKWARD: (-1, 0, 0),
    Kind.INPUT_GRADIENT: (-1, 1, 0),
    Kind.WEIGHT_GRADIENT: (0, -1, 0),
    Kind.RECOMPUTE: (1, 0, -1),
}


def _most(actions: Row) -> tuple[Holding, ...]:
    """Return the moments of one stage of which no other holds as much of everything."""
    kinds = actions["kind"]
    changes = np.zeros((len(actions), 3), dtype=np.int64)
    for kind, change in _CHANGES.items():
        changes[kinds == kind] = change
    again = np.isin(actions["microbatch"], actions["microbatch"][kinds == Kind.RECOMPUTE])
    changes[(kinds == Kind.FORWARD) & again] = (0, 0, 1)
    moments = set(map(tuple, np.cumsum(changes, axis=0).tolist()))
    highest: dict[tuple[int, int], int] = {}
    for whole, halved, inputs in moments:
        highest[halved, inputs] = max(whole, highest.get((halved, inputs), 0))
    found: NDArray[np.int64] = np.array([(whole, *rest) for rest, whole in sorted(highest.items())])
    each, other = found[:, None], found[None]
    less = np.all(each <= other, axis=2) & np.any(each < other, axis=2)
    return tuple(Holding(*moment) for moment in found[~np.any(less, axis=1)].tolist())
