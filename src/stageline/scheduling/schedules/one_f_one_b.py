"""1F1B: once the pipeline is full, every rank alternates one forward and one backward.

    rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3        p = 3 ranks
    rank 1      F0 F1 .  B0 F2 B1 F3 B2 .  B3           m = 4 microbatches
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3              (a dot is a wait; drawn with B as long as F)

A rank holds at most ``p - rank`` activations, however many microbatches there are. That bound is
the reason to prefer 1F1B over GPipe; the bubble, (p - 1) * (F + B), is the same. But the steady
state goes to and fro: with latency c it takes (m + p - 1) * (F + B) + 2 * c * h for
h = (p - 1) + (m - 1) - ceil((m - 1) / p) hops, and h grows with the microbatches.

With ``ahead=a`` every rank is a more microbatches ahead of the next one, so that a gradient may be
late and nobody waits. Latencies up to a * (F + B) / 2 then cost 2 * c * (p - 1) in all, however
many microbatches there are. The price is a * (p - 1 - rank) more activations.
"""

from __future__ import annotations

from stageline.errors import ScheduleError
from stageline.scheduling.schedule import Row, Schedule
from stageline.scheduling.schedules.rows import (
    alternate,
    backwards,
    build_rows,
    forwards,
    one_after_another,
)


def one_f_one_b(
    num_stages: int, num_microbatches: int, *, num_ranks: int | None = None, ahead: int = 0
) -> Schedule:
    """Return the 1F1B schedule.

    >>> print(one_f_one_b(num_stages=2, num_microbatches=3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> print(one_f_one_b(num_stages=2, num_microbatches=3, ahead=1))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        num_stages: Pieces of the model.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; one per stage unless given. A rank holds consecutive stages.
        ahead: How many microbatches every rank is further ahead of the next one than it has to be:
            what they need to wait less for each other, where links are slow or times scatter.

    Raises:
        ScheduleError: ``ahead`` is negative.
    """
    if ahead < 0:
        raise ScheduleError(f"1f1b: ahead is {ahead}: give 0, or how many microbatches more")

    def row(rank: int, stages: range) -> Row:
        ranks_below = (num_ranks or num_stages) - 1 - rank
        # Short batches never fill the pipeline, hence the minimum.
        warmup = min(ranks_below * (1 + ahead), num_microbatches)
        steady = num_microbatches - warmup

        fill = forwards(stages, range(warmup))
        one_and_one = alternate(
            forwards(stages, range(warmup, num_microbatches)), backwards(stages, range(steady))
        )
        drain = backwards(stages, range(steady, num_microbatches))
        return one_after_another(fill, one_and_one, drain)

    return build_rows(
        f"1f1b, {ahead} ahead" if ahead else "1f1b",
        row,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
    )
