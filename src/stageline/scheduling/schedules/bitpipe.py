"""BitPipe: two copies of the model, each laid in a V, one from each end of the ranks.

PICTURE
"""

from __future__ import annotations

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import Queue, alternate, lines, one_after_another
from stageline.scheduling.schedules.sizes import check_even_ranks, check_microbatches, ranks_with

NAME = "bitpipe"


def bitpipe(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the BitPipe schedule, to simulate and draw.

    >>> print(bitpipe(num_stages=4, num_microbatches=2))
    replicas: 2
    0F0 1F1 3F0 2F1 3B0 2B1 0B0 1B1
    0F1 1F0 3F1 2F0 3B1 2B0 0B1 1B0

    Args:
        num_stages: Pieces of the model, two per rank and copy.
        num_microbatches: Slices of the batch, a multiple of the ranks; of each such unit the first
            half takes the copy that begins on rank 0, the second the other.
        num_ranks: Workers, an even number.

    Raises:
        ScheduleError: The sizes do not fit; the message names some that do.
    """
    ranks = ranks_with(NAME, 2, num_stages=num_stages, num_ranks=num_ranks)
    check_even_ranks(NAME, ranks)
    check_microbatches(
        NAME, num_microbatches, least=ranks, multiple=ranks, why="half a unit per copy"
    )
    rows = (_row(rank, ranks, num_microbatches) for rank in range(ranks))
    return Schedule(tuple(rows), NAME, replicas=2)


def _row(rank: int, ranks: int, num_microbatches: int) -> Row:
    forwards, backwards = (
        Queue(_woven(rank, ranks, num_microbatches, kind)) for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    warmup = ranks + ranks // 2 + min(rank, ranks - 1 - rank)
    steady = 2 * ranks - warmup
    turn = warmup - steady + 1  # from draining one unit to filling the next

    phases = [forwards.take(warmup)]
    for _ in range(num_microbatches // ranks - 1):
        phases += [
            alternate(forwards.take(steady), backwards.take(steady)),
            backwards.take(turn),
            alternate(forwards.take(steady - 1), backwards.take(steady - 1)),
            forwards.take(turn),
        ]
    phases += [alternate(forwards.take(steady), backwards.take(steady)), backwards.rest()]
    return one_after_another(*phases)


def _woven(rank: int, ranks: int, num_microbatches: int, kind: Kind) -> Row:
    """Return all forwards or all backwards of a rank: unit by unit, its four stages in turn."""
    half = ranks // 2
    units = np.arange(num_microbatches).reshape(-1, 2, half)
    copies = [(rank, 2 * ranks - 1 - rank), (ranks - 1 - rank, ranks + rank)]
    near = rank // half  # the copy that begins in this half of the ranks

    def queue(copy: int, place: int) -> Queue:
        place = place if kind is Kind.FORWARD else 1 - place  # backwards begin with the later stage
        microbatches = units[:, copy].ravel()
        return Queue(lines(kind, np.full(len(microbatches), copies[copy][place]), microbatches))

    near_first, near_second = queue(near, 0), queue(near, 1)
    far_first, far_second = queue(1 - near, 0), queue(1 - near, 1)
    early = max(half - rank, rank - half + 1)  # how many pass before the first of the far copy
    late = half - early
    woven: list[Row] = []
    for _ in units:
        woven += [
            near_first.take(early),
            alternate(far_first.take(late), near_first.take(late)),
            alternate(far_first.take(early), far_second.take(early)),
            alternate(near_second.take(late), far_second.take(late)),
            near_second.take(early),
        ]
    return one_after_another(*woven).reshape(-1, 1)
