"""The rule of DualPipe and DualPipeV: two streams of microbatches meet on every rank.

The near stream of a rank began closer to it than the far one did. A rank in the ``half`` that is
``depth`` steps from where its near stream begins runs, with F and B of near (0) and far (1):

    1  F0                       fill: the near stream first
    2  F0 F1                    then both
    3  I1 W F1                  the first backwards come back; halves, because others wait for I
    4  F0&B1 F1&B0              one stream forward while the other goes backward
    5  B1 F1&B0                 no more forwards of the near stream
    6  B1 B0                    drain; from the middle on in halves
    7  W I0
    8  W
"""

from __future__ import annotations

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import Positions, Row
from stageline.scheduling.schedules.rows import (
    Queue,
    alternate,
    as_kind,
    backwards,
    forwards,
    one_after_another,
)


def dual_row(
    near: tuple[int, range], far: tuple[int, range], *, half: int, depth: int
) -> tuple[Row, Positions]:
    """Return the row of a rank and where its pairs stand.

    Args:
        near: Stage and microbatches of the stream whose beginning is closer.
        far: Those of the other stream; as many microbatches, at least ``2 * half``.
        half: How many ranks lie between the beginning and the turn.
        depth: Where the rank lies among them, from 0.
    """
    f0, b0 = _queues(*near)
    f1, b1 = _queues(*far)
    inner, outer = depth + 1, half - depth - 1
    main = len(near[1]) - 2 * half + inner

    fill = [f0.take(2 * outer), alternate(f0.take(inner), f1.take(inner))]
    i1 = as_kind(Kind.INPUT_GRADIENT, b1.take(outer))
    first_back = alternate(i1, as_kind(Kind.WEIGHT_GRADIENT, i1), f1.take(outer))
    meet = alternate(f0.take(main), b1.take(main), f1.take(main), b0.take(main))
    no_more = alternate(b1.take(outer), f1.take(outer), b0.take(outer))

    drain = one_after_another(alternate(b1.take(inner), b0.take(inner)))
    # Half of the rounds stay whole: in halves, a backward frees the ranks that wait for it sooner.
    drain["kind"][2 * (inner // 2) + (inner % 2) :] = Kind.INPUT_GRADIENT
    i0 = as_kind(Kind.INPUT_GRADIENT, b0.rest())
    pending = np.concatenate([drain[drain["kind"] == Kind.INPUT_GRADIENT], i0.ravel()])
    weights = Queue(as_kind(Kind.WEIGHT_GRADIENT, pending).reshape(-1, 1))
    end = [drain, alternate(weights.take(outer), i0), weights.rest()]

    row = one_after_another(*fill, first_back, meet, no_more, *end)
    is_pair = (row["kind"][:-1] == Kind.FORWARD) & (row["kind"][1:] == Kind.BACKWARD)
    pairs = np.flatnonzero(is_pair)
    # At the turn, B1 is the backward of what F1 has just made: nothing is left to overlap with.
    return row, pairs[1:] if depth == half - 1 else pairs


def _queues(stage: int, microbatches: range) -> tuple[Queue, Queue]:
    stages = range(stage, stage + 1)
    return Queue(forwards(stages, microbatches)), Queue(backwards(stages, microbatches))
