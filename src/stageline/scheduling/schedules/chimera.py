"""Chimera: two copies of the model, one from each end of the ranks, each filling the other's waits.

PICTURE
"""

from __future__ import annotations

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import Integers, lines
from stageline.scheduling.schedules.sizes import check_even_ranks, check_microbatches, ranks_with

NAME = "chimera"


def chimera(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the Chimera schedule, to simulate and draw.

    >>> print(chimera(num_stages=2, num_microbatches=2))
    replicas: 2
    0F0 1F1 1B1 0B0
    0F1 1F0 1B0 0B1

    Args:
        num_stages: Pieces of the model, one per rank and an even number.
        num_microbatches: Slices of the batch, a multiple of the ranks; of each such unit the first
            half goes down from rank 0, the second up from the last rank.
        num_ranks: As many as there are stages.

    Raises:
        ScheduleError: The sizes do not fit; the message names some that do.
    """
    ranks = ranks_with(NAME, 1, num_stages=num_stages, num_ranks=num_ranks)
    check_even_ranks(NAME, ranks)
    check_microbatches(
        NAME, num_microbatches, least=ranks, multiple=ranks, why="half a unit per direction"
    )
    microbatches = np.arange(num_microbatches).reshape(-1, 2, ranks // 2)
    down, up = (microbatches[:, direction].ravel() for direction in (0, 1))
    rows = (_row(rank, ranks, down, up) for rank in range(ranks))
    return Schedule(tuple(rows), NAME, replicas=2)


def _row(rank: int, ranks: int, down: Integers, up: Integers) -> Row:
    """Put everything in order of its slot on a clock that counts forwards and backwards alike."""
    actions, slots = [], []
    for stage, microbatches in ((rank, down), (ranks - 1 - rank, up)):
        unit, place = np.divmod(np.arange(len(microbatches)), ranks // 2)
        entered = 2 * ranks * unit + 2 * place
        stages = np.full(len(microbatches), stage)
        actions += [lines(kind, stages, microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        slots += [entered + stage, entered + 2 * ranks - 1 - stage]
    row: Row = np.concatenate(actions).ravel()[np.argsort(np.concatenate(slots), kind="stable")]
    return row
