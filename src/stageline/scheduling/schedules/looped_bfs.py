"""Looped BFS: all microbatches through the first stage of a rank, then all through its second.

    rank 0   0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B2 2B1 2B0 0B2 0B1 0B0
    rank 1   .   1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0

    p = 2 ranks, m = 3 microbatches, v = 2 stages per rank   (drawn with B as long as F)

As fast as interleaved 1F1B, (p - 1) * (F + B) / v of bubble, but every activation is held: m on
each rank. A stage does all its work in one go, so with sharded data parallelism its weights are
gathered and its gradients reduced once, while other stages compute. Backwards run in descending
order of microbatches, as in torch's ScheduleLoopedBFS.
"""

from __future__ import annotations

import numpy as np

from stageline.scheduling.schedule import Schedule
from stageline.scheduling.schedules.looping import looped_lines, round_trips
from stageline.scheduling.schedules.rows import one_after_another
from stageline.scheduling.schedules.sizes import check_sizes, looped_ranks

NAME = "looped-bfs"


def looped_bfs(
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    stages_per_rank: int | None = None,
) -> Schedule:
    """Return the looped breadth-first schedule.

    >>> print(looped_bfs(num_stages=4, num_microbatches=2))
    0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
    1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0

    Args:
        num_stages: Pieces of the model, a multiple of the ranks.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; rank r holds stages r, r + num_ranks, r + 2 * num_ranks, ...
        stages_per_rank: Instead of ``num_ranks``; 2 unless either is given.

    Raises:
        ScheduleError: The sizes do not fit; the message names some that do.
    """
    check_sizes(NAME, num_microbatches=num_microbatches)
    ranks, laps = looped_ranks(
        NAME, num_stages=num_stages, num_ranks=num_ranks, stages_per_rank=stages_per_rank
    )
    lap, ascending = round_trips(num_microbatches, num_microbatches, laps)
    descending = np.flip(ascending)
    rows = []
    for rank in range(ranks):
        forwards, _ = looped_lines(rank, ranks, laps, (lap, ascending))
        _, backwards = looped_lines(rank, ranks, laps, (lap, descending))
        rows.append(one_after_another(forwards, backwards))
    return Schedule(tuple(rows), NAME)
