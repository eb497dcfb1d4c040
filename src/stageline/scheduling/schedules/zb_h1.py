"""ZB-H1: 1F1B with the backward in two halves, and weight gradients where a rank would wait.

    rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    p = 3 ranks, m = 4 microbatches   (I input gradient, W weight gradient)

Others wait only for the input gradient, so a rank passes it on first and computes weight gradients
when it would wait. A rank holds p activations, as the first rank of 1F1B does, and the bubble
falls from (p - 1) * (F + B) to (p - 1) * (F + I - min(F, I, W)): to a third, if the three are
equal.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import build_rows, forwards
from stageline.scheduling.schedules.rows import input_gradients as inputs
from stageline.scheduling.schedules.rows import weight_gradients as weights
from stageline.scheduling.schedules.zero_bubble import delayed_weights

NAME = "zb-h1"


def zb_h1(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the ZB-H1 schedule.

    >>> print(zb_h1(num_stages=2, num_microbatches=3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Args:
        num_stages: Pieces of the model.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; one per stage unless given. A rank holds consecutive stages.
    """

    def row(rank: int, stages: range) -> Row:
        everything = range(num_microbatches)
        ranks_below = (num_ranks or num_stages) - 1 - rank
        return delayed_weights(
            forwards(stages, everything),
            inputs(stages, everything),
            weights(stages, everything),
            warmup=ranks_below,
            delay=rank,
        )

    return build_rows(
        NAME,
        row,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
    )
