"""Interleaved 1F1B: a rank holds several stages, and microbatches go round the ranks in groups.

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1   .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    p = 2 ranks, m = 4 microbatches, v = 2 stages per rank   (drawn with B as long as F)

A rank begins and ends with a piece of its work, so that filling and draining take 1 / v of the
time: with v stages per rank the bubble is (p - 1) * (F + B) / v. The price is v times as many
transfers and a little more memory: rank r holds (v - 1) * p + 2 * (p - 1 - r) + 1 of its stages'
activations, on rank 0 p + (p - 1) / v in units of a rank's share. With a small latency c it takes
2 * c * (v * p - 1) more, however many microbatches there are.

The order is Megatron's: microbatches go round in groups of p, or more where a remainder would be
too small to fill a round. Where p divides m, torch's ScheduleInterleaved1F1B is the same.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Schedule
from stageline.scheduling.schedules.looping import choose_group, looped_lines, round_trips
from stageline.scheduling.schedules.rows import alternate, one_after_another
from stageline.scheduling.schedules.sizes import looped_ranks

NAME = "interleaved"


def interleaved(
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    stages_per_rank: int | None = None,
    group_size: int | None = None,
) -> Schedule:
    """Return the interleaved 1F1B schedule, in Megatron's order.

    >>> print(interleaved(num_stages=4, num_microbatches=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Args:
        num_stages: Pieces of the model, a multiple of the ranks.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; rank r holds stages r, r + num_ranks, r + 2 * num_ranks, ...
        stages_per_rank: Instead of ``num_ranks``; 2 unless either is given.
        group_size: How many microbatches go round together: from ``num_ranks`` to all, with no
            remainder or one of at least ``num_ranks``. The smallest that fits unless given.

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
        warmup = min(2 * (ranks - 1 - rank) + (laps - 1) * group, len(forwards))
        steady = len(forwards) - warmup

        fill = forwards[:warmup]
        one_and_one = alternate(forwards[warmup:], backwards[:steady])
        drain = backwards[steady:]
        rows.append(one_after_another(fill, one_and_one, drain))
    return Schedule(tuple(rows), NAME)
