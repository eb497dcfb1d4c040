"""DualPipe: two copies of the model, one from each end of the ranks, that overlap where they meet.

    rank 0   0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3&3B5 .   3F6&0B0 3B6==== 3F7&0B1 3B7==== 0I2 0W2 0I3 0W3
    rank 1   .   1F0 2F4 1F1 2F5 1F2 2B4==== 2F6&1B0 1F3&2B5 2F7&1B1 2B6==== 1B2==== 2I7 1I3 2W7 1W3
    rank 2   .   1F4 2F0 1F5 2F1 1F6 2B0==== 2F2&1B4 1F7&2B1 2F3&1B5 2B2==== 1B6==== 2I3 1I7 2W3 1W7
    rank 3   0F4 0F5 0F6 3F0 3I0 3W0 3F1 0F7&3B1 .   3F2&0B4 3B2==== 3F3&0B5 3B3==== 0I6 0W6 0I7 0W7

    p = 4 ranks, m = 8 microbatches

Rank r holds stages r and p - 1 - r; half of the microbatches go down from rank 0, half up from the
last rank. In the middle of the step a rank runs a forward of one direction and a backward of the
other together. The bubble is (p / 2 - 1) * (F&B + B - 3 * W), and F&B, the time of the pair, may
be less than F + B. A rank holds p + 1 activations, and the weights twice: it can be simulated and
drawn, not run. ``dualpipe_v`` does the same with one copy.
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
