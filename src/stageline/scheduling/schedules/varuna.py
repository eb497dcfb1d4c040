"""Varuna: forwards are thrown away and recomputed, just before the gradient comes back.

    rank 0   F0 F1 F2 F3 R0 .  B0 R1 B1 R2 B2 R3 .  .  B3
    rank 1   .  F0 F1 F2 R0 B0 R1 B1 R2 B2 F3 R3 .  B3
    rank 2   .  .  F0 B0 F1 B1 F2 B2 .  .  .  F3 B3

    p = 3 ranks, m = 4 microbatches   (R recompute; drawn with B as long as F)

Only the input of a stage is kept from its forward; its activations are computed again when the
rank below begins its own backward, and are there when the gradient comes. The last rank keeps its
own. A rank holds the inputs of min(3 * (p - 1 - r), m) microbatches, and the activations of one.
If B = 2 * F and R = F, T exceeds m * (F + R + B) by at most (3 * p - 4) * F.

The order is that of Varuna's generator: first a running backward, then a new one, then R, then F.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import NO_PEER, ROW_DTYPE, Row, Schedule
from stageline.scheduling.schedules.rows import build_rows
from stageline.scheduling.schedules.sizes import check_sizes, straight_ranks

NAME = "varuna"

_PRIORITY = (Kind.WEIGHT_GRADIENT, Kind.BACKWARD, Kind.RECOMPUTE, Kind.FORWARD)
"""What a rank does first; the weight gradient stands for the second half of a running backward."""


def varuna(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return the Varuna schedule, with its recomputations.

    >>> print(varuna(num_stages=2, num_microbatches=3))
    0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        num_stages: Pieces of the model.
        num_microbatches: Slices of the batch, any number.
        num_ranks: Workers; one per stage unless given. A rank holds consecutive stages.
    """
    check_sizes(NAME, num_microbatches=num_microbatches)
    ranks = straight_ranks(NAME, num_stages=num_stages, num_ranks=num_ranks)
    orders = _orders(ranks, num_microbatches)

    def row(rank: int, stages: range) -> Row:
        return _through(stages, np.array(orders[rank]))

    return build_rows(
        NAME,
        row,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
    )


def _orders(num_ranks: int, num_microbatches: int) -> list[list[tuple[int, int]]]:
    """Let every rank take what is most urgent, tick by tick; return kinds and microbatches.

    F and R take a tick, B two. R is called for when the backward begins on the rank below, so that
    it is done when the gradient comes. The last rank still has what it needs.
    """
    queues = [{kind: deque[int]() for kind in _PRIORITY} for _ in range(num_ranks)]
    queues[0][Kind.FORWARD].extend(range(num_microbatches))
    orders: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    left = num_ranks * num_microbatches
    while left:
        chosen = []
        for rank, waiting in enumerate(queues):
            kind = next((kind for kind in _PRIORITY if waiting[kind]), None)
            if kind is not None:
                chosen.append((rank, kind, waiting[kind].popleft()))
        for rank, kind, microbatch in chosen:
            if kind is Kind.WEIGHT_GRADIENT:
                left -= 1
                continue
            orders[rank].append((kind, microbatch))
            for after, what in _calls_for(rank, kind, num_ranks - 1):
                queues[after][what].append(microbatch)
    return orders


def _calls_for(rank: int, kind: Kind, last: int) -> list[tuple[int, Kind]]:
    """Return which ranks may do what next, once this is done."""
    if kind is Kind.FORWARD:
        return [(rank + 1, Kind.FORWARD)] if rank < last else [(rank, Kind.BACKWARD)]
    if kind is Kind.RECOMPUTE:
        return [(rank, Kind.BACKWARD)]
    above = [(rank - 1, Kind.RECOMPUTE)] if rank else []
    return [(rank, Kind.WEIGHT_GRADIENT), *above]


def _through(stages: range, order: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Row:
    """Return the row of a rank: each action through its stages, backwards from the last."""
    row = np.empty((len(order), len(stages)), dtype=ROW_DTYPE)
    kind, microbatch = order.T[:, :, np.newaxis]
    row["kind"], row["microbatch"], row["peer"] = kind, microbatch, NO_PEER
    row["stage"] = np.where(kind == Kind.BACKWARD, stages[::-1], stages)
    return row.ravel()
