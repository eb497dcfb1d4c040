"""What the schedule families share: which stages a rank holds, and how it runs them as one unit.

Several stages on a rank are consecutive, and the rank runs them as if they were one: forward
through all of them, ascending, or backward through all of them, descending. A family therefore
states its rule for ranks and need not know how many stages each holds.

    forwards([4, 5], range(2))  is  4F0 5F0      backwards([4, 5], range(2))  is  5B0 4B0
                                    4F1 5F1                                       5B1 4B1

These are lines: one for each microbatch. Families that hold stages which are not consecutive write
each as lines of its own, and take from them as a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stageline.scheduling.action import Kind
from stageline.scheduling.schedule import NO_PEER, ROW_DTYPE, Row, Schedule
from stageline.scheduling.schedules.sizes import check_sizes, straight_ranks

Integers: TypeAlias = npt.NDArray[np.int64]


def contiguous(num_stages: int, num_ranks: int) -> list[range]:
    """Return the stages of each rank: consecutive, sizes at most one apart, larger ones first.

    >>> contiguous(num_stages=5, num_ranks=2)
    [range(0, 3), range(3, 5)]
    """
    size, larger = divmod(num_stages, num_ranks)
    begins = [rank * size + min(rank, larger) for rank in range(num_ranks + 1)]
    return [range(begins[rank], begins[rank + 1]) for rank in range(num_ranks)]


def build_rows(
    name: str,
    row: Callable[[int, range], Row],
    *,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int | None,
) -> Schedule:
    """Build a schedule from the rule of a family.

    Args:
        name: The family.
        row: Its rule: rank and stages of the rank -> what the rank does.
        num_stages: At least one.
        num_microbatches: At least one; fewer than stages is fine.
        num_ranks: One per stage unless given; at most that.

    Raises:
        ScheduleError: The numbers make no pipeline.
    """
    check_sizes(name, num_microbatches=num_microbatches)
    ranks = straight_ranks(name, num_stages=num_stages, num_ranks=num_ranks)
    placed = enumerate(contiguous(num_stages, ranks))
    return Schedule(tuple(row(rank, stages) for rank, stages in placed), name)


def forwards(stages: range, microbatches: range) -> Row:
    """Return the forward of each microbatch, one line each, through the stages of a rank."""
    return _actions(Kind.FORWARD, stages, microbatches)


def backwards(stages: range, microbatches: range) -> Row:
    """Return the backward of each microbatch, one line each, back through the stages."""
    return _actions(Kind.BACKWARD, stages[::-1], microbatches)


def input_gradients(stages: range, microbatches: range) -> Row:
    """Return the first half of each backward, one line each, back through the stages."""
    return _actions(Kind.INPUT_GRADIENT, stages[::-1], microbatches)


def weight_gradients(stages: range, microbatches: range) -> Row:
    """Return the second half of each backward, one line each, in the order of the first."""
    return _actions(Kind.WEIGHT_GRADIENT, stages[::-1], microbatches)


def lines(kind: Kind, stages: Integers, microbatches: Integers) -> Row:
    """Return one line of one action for each stage and microbatch, taken together."""
    actions = np.empty((len(microbatches), 1), dtype=ROW_DTYPE)
    actions["kind"] = kind
    actions["stage"][:, 0] = stages
    actions["microbatch"][:, 0] = microbatches
    actions["peer"] = NO_PEER
    return actions


def as_kind(kind: Kind, taken: Row) -> Row:
    """Return the same lines as actions of another kind."""
    changed = taken.copy()
    changed["kind"] = kind
    return changed


class Queue:
    """The lines of one stage, taken from the front.

    >>> queue = Queue(forwards(range(3, 4), range(5)))
    >>> len(queue.take(2)), len(queue.rest())
    (2, 3)
    """

    def __init__(self, waiting: Row) -> None:
        self._waiting = waiting

    def take(self, count: int) -> Row:
        """Return the next lines and advance."""
        assert count <= len(self._waiting), "a rule takes what is there"
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def rest(self) -> Row:
        """Return all that are left."""
        return self.take(len(self._waiting))


def alternate(*units: Row) -> Row:
    """Return line 0 of each of the units, then line 1 of each, and so on."""
    return np.concatenate(units, axis=1)


def one_after_another(*phases: Row) -> Row:
    """Return the row of a rank that runs these phases in turn, each line by line."""
    return np.concatenate([phase.ravel() for phase in phases])


def _actions(kind: Kind, stages: Sequence[int], microbatches: range) -> Row:
    actions = np.empty((len(microbatches), len(stages)), dtype=ROW_DTYPE)
    actions["kind"] = kind
    actions["stage"] = np.asarray(stages)
    actions["microbatch"] = np.asarray(microbatches)[:, np.newaxis]
    actions["peer"] = NO_PEER
    return actions
