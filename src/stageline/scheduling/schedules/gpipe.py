"""GPipe: every rank runs all its forwards, then all its backwards.

    rank 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3        p = 3 ranks
    rank 1      F0 F1 F2 F3 .  .  B0 B1 B2 B3           m = 4 microbatches
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3              (a dot is a wait; drawn with B as long as F)

The simplest pipeline, and the one that suffers least from slow links: with latency c it takes
(m + p - 1) * (F + B) + 2 * (p - 1) * c, however many microbatches there are. The price is memory:
every rank holds the activations of all m microbatches at once.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import (
    backwards,
    build_rows,
    forwards,
    one_after_another,
)


def gpipe(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the GPipe schedule.

    >>> print(gpipe(num_stages=2, num_microbatches=2))
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1

    Args:
        num_stages: Pieces of the model.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; one per stage unless given. A rank holds consecutive stages.
    """

    def row(rank: int, stages: range) -> Row:
        everything = range(num_microbatches)
        return one_after_another(forwards(stages, everything), backwards(stages, everything))

    return build_rows(
        "gpipe",
        row,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
    )
