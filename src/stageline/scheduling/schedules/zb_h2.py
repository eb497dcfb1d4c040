"""ZB-H2: as ZB-H1, but filled twice as deep, so that no rank ever waits.

PICTURE
"""

from __future__ import annotations

from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import build_rows, forwards
from stageline.scheduling.schedules.rows import input_gradients as inputs
from stageline.scheduling.schedules.rows import weight_gradients as weights
from stageline.scheduling.schedules.sizes import check_microbatches, check_sizes
from stageline.scheduling.schedules.zero_bubble import delayed_weights

NAME = "zb-h2"


def zb_h2(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the ZB-H2 schedule.

    >>> print(zb_h2(num_stages=2, num_microbatches=4))
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

    Args:
        num_stages: Pieces of the model.
        num_microbatches: Slices of the batch, at least two per rank.
        num_ranks: Workers; one per stage unless given. A rank holds consecutive stages.

    Raises:
        ScheduleError: There are fewer microbatches.
    """
    ranks = num_ranks or num_stages
    check_sizes(NAME, num_stages=num_stages, num_ranks=num_ranks)
    check_microbatches(
        NAME, num_microbatches, least=2 * ranks, why="two per rank fill the pipeline"
    )

    def row(rank: int, stages: range) -> Row:
        everything = range(num_microbatches)
        return delayed_weights(
            forwards(stages, everything),
            inputs(stages, everything),
            weights(stages, everything),
            warmup=2 * (ranks - 1 - rank),
            delay=2 * rank,
        )

    return build_rows(
        NAME,
        row,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
    )
