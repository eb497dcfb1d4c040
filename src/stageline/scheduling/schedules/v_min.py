"""V-Min: the V of ZB-V with a third of the activations of 1F1B.

    rank 0   0F0 0F1 .   3F0 3I0 3W0 .   0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 .   0I2 0W2
    rank 1   .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    p = 2 ranks, m = 3 microbatches, 4 stages   (I input gradient, W weight gradient)

Rank r holds stages r and 2p - 1 - r: the first and the last stage meet on rank 0, and the turn
costs no transfer. Microbatches follow each other so that a rank holds at most floor((p + 4) / 3)
activations, a third of what 1F1B holds on its first rank. If F, I and W are equal, span exceeds m
* (F + B) by (4 * p - 5) / 2 * F, or (4 * p - 7) / 2 * F where p is a multiple of 3: two thirds of
the bubble of 1F1B. It suffers more than V-Half where they are not equal.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Schedule
from stageline.scheduling.schedules.building_blocks import from_building_block

NAME = "v-min"


def v_min(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the V-Min schedule.

    Args:
        num_stages: Pieces of the model, two per rank.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; rank r holds stages r and num_stages - 1 - r.

    Raises:
        ScheduleError: There are not two stages for every rank.
    """
    return from_building_block(NAME, _block, num_stages, num_microbatches, num_ranks)


def _block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    shift = 2 if ranks % 3 == 0 else 0  # else two actions of a rank would meet in one slot
    return (
        rank,
        2 * ranks - rank - 1,
        2 * ranks + shift + rank,
        4 * ranks + shift - rank - 1,
    )
