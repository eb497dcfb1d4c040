"""What the looped families share: stage = lap * p + rank, and the order of groups of microbatches.

    p = 2 ranks, 2 stages each      rank 0 holds stages 0 and 2, rank 1 holds 1 and 3

A rank takes a group of microbatches through its first stage, then the same group through its
second, and so on: a microbatch is back at rank 0 just when the group has passed. (Megatron calls
the place of a stage on its rank the model chunk.)
"""

from __future__ import annotations

import numpy as np

from stageline.errors import ScheduleError
from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Row
from stageline.scheduling.schedules.rows import Integers, lines
from stageline.scheduling.schedules.sizes import check_sizes


def choose_group(name: str, num_ranks: int, num_microbatches: int, group_size: int | None) -> int:
    """Return how many microbatches go round together.

    A group must be as large as the pipeline is long, or its first microbatch would not be back
    when the last has left; and so must what remains for the last group. The smallest such size
    keeps the fewest activations. Fewer microbatches than ranks are one group.

    >>> [choose_group("interleaved", 4, count, None) for count in (3, 8, 10, 14)]
    [3, 4, 5, 5]
    """
    check_sizes(name, num_microbatches=num_microbatches, group_size=group_size)
    fitting = fitting_groups(num_ranks, num_microbatches)
    if group_size is None:
        return fitting[0]
    if group_size not in fitting:
        near = sorted(fitting, key=lambda size: abs(size - group_size))[:2]
        raise ScheduleError(
            f"{name} needs groups of at least one microbatch per rank, the last one too, got "
            f"group_size={group_size} for num_microbatches={num_microbatches} on {num_ranks} "
            f"ranks: use group_size={' or '.join(map(str, sorted(near)))}"
        )
    return group_size


def fitting_groups(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return the sizes of group that fit, ascending."""
    if num_microbatches <= num_ranks:
        return [num_microbatches]
    sizes = np.arange(num_ranks, num_microbatches + 1)
    remainder = num_microbatches % sizes
    fitting: list[int] = sizes[(remainder == 0) | (remainder >= num_ranks)].tolist()
    return fitting


def round_trips(num_microbatches: int, group_size: int, laps: int) -> tuple[Integers, Integers]:
    """Return lap and microbatch of each unit of a rank, in order.

    >>> round_trips(num_microbatches=3, group_size=2, laps=2)
    (array([0, 0, 1, 1, 0, 1]), array([0, 1, 0, 1, 2, 2]))
    """
    groups = [
        np.arange(begin, min(begin + group_size, num_microbatches))
        for begin in range(0, num_microbatches, group_size)
    ]
    lap = np.concatenate([np.repeat(np.arange(laps), len(group)) for group in groups])
    return lap, np.concatenate([np.tile(group, laps) for group in groups])


def looped_lines(
    rank: int, num_ranks: int, laps: int, trips: tuple[Integers, Integers]
) -> tuple[Row, Row]:
    """Return the forwards of a rank and its backwards, which take the laps the other way."""
    lap, microbatch = trips
    return (
        lines(Kind.FORWARD, lap * num_ranks + rank, microbatch),
        lines(Kind.BACKWARD, (laps - 1 - lap) * num_ranks + rank, microbatch),
    )
