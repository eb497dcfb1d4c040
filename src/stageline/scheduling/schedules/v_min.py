"""V-Min: the V of ZB-V with a third of the activations of 1F1B.

PICTURE
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
