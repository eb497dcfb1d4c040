"""Sequential: one microbatch at a time, forward through all stages and back.

    rank 0   F0 .  .  .  .  B0 F1 .  .  .  .  B1        p = 3 ranks
    rank 1      F0 .  .  B0       F1 .  .  B1           m = 2 microbatches
    rank 2         F0 B0             F1 B1              (a dot is a wait; drawn with B as long as F)

Only one rank works at any time, so nothing overlaps and nothing is gained but clarity: the order of
events is that of the plain model. Use it to find a bug, or where the model must be spread over
devices for its size alone. A rank holds the activations of one microbatch.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import (
    alternate,
    backwards,
    build_rows,
    forwards,
    one_after_another,
)


def sequential(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the sequential schedule.

    >>> print(sequential(num_stages=2, num_microbatches=2))
    0F0 0B0 0F1 0B1
    1F0 1B0 1F1 1B1

    Args:
        num_stages: Pieces of the model.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; one per stage unless given. A rank holds consecutive stages.
    """

    def row(rank: int, stages: range) -> Row:
        everything = range(num_microbatches)
        there_and_back = alternate(forwards(stages, everything), backwards(stages, everything))
        return one_after_another(there_and_back)

    return build_rows(
        "sequential",
        row,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
    )
