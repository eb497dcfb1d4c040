"""DualPipe: two copies of the model, one from each end of the ranks, that overlap where they meet.

PICTURE
"""

from __future__ import annotations

from stageline.scheduling.schedule import Schedule
from stageline.scheduling.schedules.dual import dual_row
from stageline.scheduling.schedules.sizes import check_even_ranks, check_microbatches, ranks_with

NAME = "dualpipe"


def dualpipe(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the DualPipe schedule, to simulate and draw.

    >>> schedule = dualpipe(num_stages=4, num_microbatches=8)
    >>> schedule.replicas, schedule.stages_of(1)
    (2, (1, 2))

    Args:
        num_stages: Pieces of the model, one per rank and an even number.
        num_microbatches: Slices of the batch, an even number of at least two per rank; the first
            half goes down from rank 0, the second up from the last rank.
        num_ranks: As many as there are stages.

    Raises:
        ScheduleError: The sizes do not fit; the message names some that do.
    """
    ranks = ranks_with(NAME, 1, num_stages=num_stages, num_ranks=num_ranks)
    check_even_ranks(NAME, ranks)
    check_microbatches(
        NAME, num_microbatches, least=2 * ranks, multiple=2, why="one per rank and direction"
    )
    middle = num_microbatches // 2
    rows = []
    for rank in range(ranks):
        streams = [(rank, range(middle)), (ranks - 1 - rank, range(middle, num_microbatches))]
        near, far = streams if rank < ranks // 2 else streams[::-1]
        depth = min(rank, ranks - 1 - rank)
        rows.append(dual_row(near, far, half=ranks // 2, depth=depth))
    arrays, pairs = zip(*rows, strict=True)
    return Schedule(arrays, NAME, pairs, replicas=2)
