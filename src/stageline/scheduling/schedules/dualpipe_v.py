"""DualPipeV: stages in a V, so that each rank runs a forward of one while another goes backward.

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 .   3F2&0B0 3B2==== 3F3&0B1 3B3==== 0I2 0W2 0I3 0W3
    rank 1   .   1F0 2F0 1F1 2F1 1F2 2B0==== 2F2&1B0 1F3&2B1 2F3&1B1 2B2==== 1B2==== 2I3 1I3 2W3 1W3

    p = 2 ranks, m = 4 microbatches, 4 stages   (0F3&3B1 overlap; drawn with B and pairs of two)

Rank r holds stages r and 2p - 1 - r: the first and the last stage meet on rank 0, and the turn
costs no transfer. In the middle of the step a rank runs a forward of one stage and a backward of
its other stage together, so that the transfers of one hide behind the work of the other. The
bubble is (p - 1) * (F&B + B - 3 * W) / 2, and F&B, the time of the pair, may be less than F + B. A
rank holds p + 1/2 activations. DeepSeek's DualPipe cut in half; the order is that of torch's
ScheduleDualPipeV.
"""

from __future__ import annotations

from stageline.scheduling.schedule import Schedule
from stageline.scheduling.schedules.dual import dual_row
from stageline.scheduling.schedules.sizes import check_microbatches, ranks_with

NAME = "dualpipe-v"


def dualpipe_v(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the DualPipeV schedule; ``0F3&3B0`` are a forward and a backward that overlap.

    >>> print(dualpipe_v(num_stages=4, num_microbatches=4))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2I3 1I3 2W3 1W3

    Args:
        num_stages: Pieces of the model, two per rank.
        num_microbatches: Slices of the batch, at least two per rank.
        num_ranks: Workers; rank r holds stages r and num_stages - 1 - r.

    Raises:
        ScheduleError: The sizes do not fit; the message names some that do.
    """
    ranks = ranks_with(NAME, 2, num_stages=num_stages, num_ranks=num_ranks)
    check_microbatches(
        NAME, num_microbatches, least=2 * ranks, why="one per stage fills the pipeline"
    )
    everything = range(num_microbatches)
    rows = []
    for rank in range(ranks):
        down, up = (rank, everything), (2 * ranks - 1 - rank, everything)
        rows.append(dual_row(down, up, half=ranks, depth=rank))
    arrays, pairs = zip(*rows, strict=True)
    return Schedule(arrays, NAME, pairs)
