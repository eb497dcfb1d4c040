"""ZB-H2: as ZB-H1, but filled twice as deep, so that no rank ever waits.

    rank 0   F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1   .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
    rank 2   .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    p = 3 ranks, m = 6 microbatches   (I input gradient, W weight gradient)

Deeper filling gives every rank work until its first gradient comes. If F, I and W are equal no
rank waits between its first forward and its last action: span is m * (F + B). In general span
exceeds that by (p - 1) * max(0, F + I - 2 * W, I - F). The price is 2 * p - 1 activations on every
rank. The ranks still begin one after the other, so T is longer by (p - 1) * F; the gain is real
where the next step may begin before this one has ended everywhere.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import build_rows, forwards
from stageline.scheduling.schedules.rows import input_gradients as inputs
from stageline.scheduling.schedules.rows import weight_gradients as weights
from stageline.scheduling.schedules.sizes import check_microbatches, straight_ranks
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
    ranks = straight_ranks(NAME, num_stages=num_stages, num_ranks=num_ranks)
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
