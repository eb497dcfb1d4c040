"""ZB-V: stages laid down and up again in a V, the backward in two halves, and no rank ever waits.

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1   .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    p = 2 ranks, m = 3 microbatches, 4 stages   (I input gradient, W weight gradient)

Rank r holds stages r and 2p - 1 - r: the first and the last stage meet on rank 0, and the turn
costs no transfer. If F, I and W are equal and m >= 2 * p - 1, no rank waits between its first
forward and its last action: span is m * (F + B), and T is longer by the (p - 1) / 2 * F in which
the ranks begin. Every rank holds p activations, as the first rank of 1F1B does. The order is that
of the authors' handcrafted schedule and of torch's ScheduleZBVZeroBubble.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import (
    Queue,
    alternate,
    forwards,
    input_gradients,
    one_after_another,
    weight_gradients,
)
from stageline.scheduling.schedules.sizes import check_sizes, ranks_with

NAME = "zb-v"


def zb_v(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the handcrafted ZB-V schedule.

    >>> print(zb_v(num_stages=4, num_microbatches=3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Args:
        num_stages: Pieces of the model, two per rank.
        num_microbatches: Slices of the batch, any number; no rank waits from 2 * ranks - 1 on.
        num_ranks: Workers; rank r holds stages r and num_stages - 1 - r.

    Raises:
        ScheduleError: There are not two stages for every rank.
    """
    check_sizes(NAME, num_microbatches=num_microbatches)
    ranks = ranks_with(NAME, 2, num_stages=num_stages, num_ranks=num_ranks)
    # The rule is one for a full pipeline; a shorter batch leaves out what it does not have.
    full = max(2 * ranks - 1, num_microbatches)
    rows = (_row(rank, ranks, full) for rank in range(ranks))
    return Schedule(tuple(row[row["microbatch"] < num_microbatches] for row in rows), NAME)


def _row(rank: int, ranks: int, num_microbatches: int) -> Row:
    f_down, i_down, w_down = _queues(rank, num_microbatches)
    f_up, i_up, w_up = _queues(2 * ranks - 1 - rank, num_microbatches)
    above, below = rank, ranks - rank  # itself counted with those below
    both = num_microbatches - (2 * ranks - 1 - rank)  # rounds that begin with a forward down
    last = ranks - 1 - rank  # rounds after the last of those
    return one_after_another(
        f_down.take(2 * below - 1),
        alternate(f_up.take(above), f_down.take(above)),
        alternate(f_up.take(below), i_up.take(below), w_up.take(below)),
        alternate(
            f_down.take(both),
            *(queue.take(both) for queue in (i_down, w_down, f_up, i_up, w_up)),
        ),
        alternate(*(queue.take(last) for queue in (i_down, w_down, f_up, i_up, w_up))),
        alternate(i_down.take(above), i_up.take(above)),
        alternate(i_down.take(below), w_down.take(below)),
        w_up.rest(),
        w_down.rest(),
    )


def _queues(stage: int, num_microbatches: int) -> tuple[Queue, Queue, Queue]:
    stages, everything = range(stage, stage + 1), range(num_microbatches)
    return (
        Queue(forwards(stages, everything)),
        Queue(input_gradients(stages, everything)),
        Queue(weight_gradients(stages, everything)),
    )
