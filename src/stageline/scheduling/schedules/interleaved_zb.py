"""Interleaved zero bubble: interleaved 1F1B with the backward in two halves, as in ZB-H1.

    rank 0   0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1   .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    p = 2 ranks, m = 2 microbatches, v = 2 stages per rank   (I input gradient, W weight gradient)

With v stages per rank the bubble is (p - 1) * (F + I - W) / v, a v-th of that of ZB-H1, with the
same p activations in units of a rank's share. With v = 2 it takes as long as ZB-V. The order is
that of torch's ScheduleInterleavedZeroBubble.
"""

from __future__ import annotations

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Schedule
from stageline.scheduling.schedules.looping import choose_group, looped_lines, round_trips
from stageline.scheduling.schedules.rows import as_kind
from stageline.scheduling.schedules.sizes import looped_ranks
from stageline.scheduling.schedules.zero_bubble import delayed_weights

NAME = "interleaved-zb"


def interleaved_zb(
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    stages_per_rank: int | None = None,
    group_size: int | None = None,
) -> Schedule:
    """Return the interleaved zero-bubble schedule (torch's ZB1P).

    >>> print(interleaved_zb(num_stages=4, num_microbatches=2))
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    Args:
        num_stages: Pieces of the model, a multiple of the ranks.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; rank r holds stages r, r + num_ranks, r + 2 * num_ranks, ...
        stages_per_rank: Instead of ``num_ranks``; 2 unless either is given.
        group_size: How many microbatches go round together; see ``interleaved``.

    Raises:
        ScheduleError: The sizes do not fit; the message names some that do.
    """
    ranks, laps = looped_ranks(
        NAME, num_stages=num_stages, num_ranks=num_ranks, stages_per_rank=stages_per_rank
    )
    group = choose_group(NAME, ranks, num_microbatches, group_size)
    trips = round_trips(num_microbatches, group, laps)
    rows = []
    for rank in range(ranks):
        forwards, backwards = looped_lines(rank, ranks, laps, trips)
        row = delayed_weights(
            forwards,
            as_kind(Kind.INPUT_GRADIENT, backwards),
            as_kind(Kind.WEIGHT_GRADIENT, backwards),
            warmup=(laps - 1) * group + ranks - 1 - rank,
            delay=rank,
        )
        rows.append(row)
    return Schedule(tuple(rows), NAME)
