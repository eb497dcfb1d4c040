"""Write the transfers into the rows, in one order that both ends of every pair of ranks share.

Some transports have one untagged channel per pair of ranks, in which a transfer happens when both
ends have come to it (NCCL). There the two ranks must issue their transfers, both directions taken
together, in the same order; early receives and free sends deadlock even plain 1F1B.

    rank 0   0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1
    rank 1   1F0<0 1F0 1F1<0 1B0 1B0>0 1F1 1B1 1B1>0

The simulated run is the witness that such an order exists. Take all actions of all ranks in the
order in which they end, and put each transfer after the action that made its value, on both ranks.
Every row is then a part of one single sequence in which makers stand before transfers and transfers
before users, so the ranks can follow it in step: no deadlock, not even if every transfer blocks.
Seen from the receiving rank, a receive comes after what has ended by the time of the send, and
before everything that ends later, its user among it.
"""

from __future__ import annotations

import numpy as np

from stageline.errors import ScheduleError
from stageline.scheduling.action import Kind
from stageline.scheduling.costs import Costs
from stageline.scheduling.schedule import ROW_DTYPE, Row, Schedule
from stageline.scheduling.times import Times
from stageline.scheduling.walk import Walk, walk
from stageline.scheduling.work import Integers, Work


def order_transfers(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Return the schedule with a send and a receive for every value that crosses ranks.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(order_transfers(one_f_one_b(num_stages=2, num_microbatches=2)))
    0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1
    1F0<0 1F0 1F1<0 1B0 1B0>0 1F1 1B1 1B1>0

    For every pair of ranks, the transfers between them stand in the same order in both rows.
    Transfers that are there already are replaced, and pairs become a forward and a backward that
    run one after the other. Every rank computes the same result by itself.

    Args:
        schedule: What to complete; it is not changed.
        costs: Which run is the witness. Any costs give a correct order; true ones give the order
            in which values are really ready.

    Raises:
        ScheduleError: The schedule deadlocks, or it cannot be run at all.
    """
    if schedule.refusal:
        raise ScheduleError(schedule.refusal)
    work = Work.of(Schedule(schedule.arrays, schedule.name))
    order = walk(work)
    times = Times.of(work, costs or Costs())
    turn = _turn(order)
    # The times at which actions end, numbered; equal times alike, for any kind of number.
    _, clock = np.unique(times.end, return_inverse=True)

    used = np.flatnonzero(work.crossing())
    made = work.waits[used]
    sends = _transfers(work, at=made, peer=used, forward=Kind.SEND_FORWARD)
    receives = _transfers(work, at=used, peer=made, forward=Kind.RECEIVE_FORWARD)

    # What happens at one time: first the actions that end then; they began earlier, so none of
    # them uses a transfer of this moment. Then the transfers, each directly after its maker's turn
    # in the walk. Actions that take no time may use those, and keep their own turn among them.
    moment = np.where(times.start == times.end, 2 * turn, -1)
    moment_of_transfer = 2 * turn[made] + 1

    rows = np.concatenate([work.rows, sends, receives])
    ranks = np.concatenate([work.ranks, work.ranks[made], work.ranks[used]])
    clocks = np.concatenate([clock, clock[made], clock[made]])
    moments = np.concatenate([moment, moment_of_transfer, moment_of_transfer])
    rows = rows[np.lexsort((moments, clocks, ranks))]

    ends = np.cumsum(np.bincount(ranks, minlength=schedule.num_ranks))
    return Schedule(tuple(np.split(rows, ends[:-1])), schedule.name)


def _turn(order: Walk) -> Integers:
    """Number the actions as the walk ran them."""
    turn = np.empty(len(order.sequence), dtype=np.int64)
    turn[order.sequence] = np.arange(len(order.sequence))
    return turn


def _transfers(work: Work, *, at: Integers, peer: Integers, forward: Kind) -> Row:
    """Return one transfer for each action ``at`` this end, with ``peer`` at the other.

    ``forward`` is the kind for values that F made; that for gradients is two further in ``Kind``.
    """
    transfers = np.empty(len(at), dtype=ROW_DTYPE)
    is_gradient = work.rows["kind"][at] != Kind.FORWARD
    transfers["kind"] = np.where(is_gradient, forward + 2, forward)
    transfers["stage"] = work.rows["stage"][at]
    transfers["microbatch"] = work.rows["microbatch"][at]
    transfers["peer"] = work.rows["stage"][peer]
    return transfers
