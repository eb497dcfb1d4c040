"""BitPipe: two copies of the model, each laid in a V, one from each end of the ranks.

    rank 0   0F0 0F1 .   3F2 4F2 3F3 4F3 7F0 7B0 7F1 7B1 4B2 3B2 4B3 3B3 0B0 .   0B1
    rank 1   .   1F0 2F2 1F1 2F3 5F2 6F0 5F3 6F1 6B0 5B2 6B1 5B3 2B2 1B0 2B3 1B1
    rank 2   .   1F2 2F0 1F3 2F1 5F0 6F2 5F1 6F3 6B2 5B0 6B3 5B1 2B0 1B2 2B1 1B3
    rank 3   0F2 0F3 .   3F0 4F0 3F1 4F1 7F2 7B2 7F3 7B3 4B0 3B0 4B1 3B1 0B2 .   0B3

    p = 4 ranks, m = 4 microbatches, 8 stages   (drawn with B as long as F)

One copy has stages r and 2p - 1 - r on rank r, the other p - 1 - r and p + r. Of every p
microbatches half take the one, half the other, in an order that lets each copy fill the waits of
the other. If B = F the bubble is (p - 2) / 2 * F for any m, half of Chimera's; if B = 2 * F it is
(p - 2) * (m / p + 1) / 2 * F. A rank holds at most p activations, and the weights twice: it can be
simulated and drawn, not run.
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
    0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0
    0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1

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
