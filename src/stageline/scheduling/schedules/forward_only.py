"""Forward-only: inference and evaluation.

    rank 0   F0 F1 F2 F3          p = 3 ranks
    rank 1      F0 F1 F2 F3       m = 4 microbatches
    rank 2         F0 F1 F2 F3

Nothing is kept for a backward, so a rank holds one activation. With latency c it takes
(m + p - 1) * F + (p - 1) * c.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import build_rows, forwards, one_after_another


def forward_only(
    num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Return the schedule that runs every microbatch forward and none backward.

    >>> print(forward_only(num_stages=2, num_microbatches=3))
    0F0 0F1 0F2
    1F0 1F1 1F2

    Args:
        num_stages: Pieces of the model.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; one per stage unless given. A rank holds consecutive stages.
    """

    def row(rank: int, stages: range) -> Row:
        return one_after_another(forwards(stages, range(num_microbatches)))

    return build_rows(
        "forward-only",
        row,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
    )
