"""Chimera: two copies of the model, one from each end of the ranks, each filling the other's waits.

    rank 0   0F0 0F1 .   3F2 3B2 3F3 3B3 0B0 .   0B1
    rank 1   .   1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
    rank 2   .   1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
    rank 3   0F2 0F3 .   3F0 3B0 3F1 3B1 0B2 .   0B3

    p = 4 ranks, m = 4 microbatches   (drawn with B as long as F)

Rank r holds stages r and p - 1 - r. Of every p microbatches half go down from rank 0, half up from
the last rank: microbatch k of a direction enters stage s in slot 2 * k + s and comes back in slot
2 * k + 2 * p - 1 - s, and the two directions never want the same slot. Further units follow after
2 * p slots each. If B = F the bubble is (p - 2) * F for any m; if B = 2 * F it is (p - 2) * (m / p
+ 1) * F. A rank holds p / 2 + 1 activations at the ends and p in the middle, and the weights
twice: it can be simulated and drawn, not run.
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
