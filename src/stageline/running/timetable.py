"""Which rows run for which call: the schedule, fitted to batch and purpose."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from stageline.running.executor import BoundRow, bind
from stageline.scheduling import Action, Kind, Schedule, order_transfers
from stageline.scheduling.passes import forward_part, forwards_first, keep_microbatches
from stageline.scheduling.recompute import Recompute, insert_recompute

_FORWARD_KINDS = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)


class Purpose(Enum):
    """What a call is for."""

    TRAIN = "a training step"
    EVALUATE = "an evaluation step"
    INFER = "inference"
    DIFFERENTIATE = "a call that can be differentiated"

    @property
    def builds_graph(self) -> bool:
        return self in (Purpose.TRAIN, Purpose.DIFFERENTIATE)


class Timetable:
    """The schedule of a pipeline, for any batch.

    Args:
        schedule: The schedule for a full batch.
        build: Number of microbatches -> the schedule for them; None where there is no rule, and
            what is missing is left out.
        recompute: Which forwards run again before their backward, besides those that the schedule
            recomputes itself.

    Attributes:
        schedule: The schedule for a full batch, with what is recomputed.
    """

    def __init__(
        self,
        schedule: Schedule,
        build: Callable[[int], Schedule] | None = None,
        recompute: Recompute = "never",
    ) -> None:
        self.schedule = insert_recompute(schedule, recompute)
        self._given = schedule
        self._build = build
        self._recompute = recompute
        # At most one entry for each number of microbatches and purpose.
        self._rows: dict[tuple[int, Purpose], tuple[BoundRow, ...]] = {}

    def _fitted(self, count: int) -> Schedule:
        """Return the schedule for a number of microbatches, as it was given."""
        full = self._given
        if count == full.num_microbatches:
            return full
        return keep_microbatches(full, count) if self._build is None else self._build(count)

    def rows(self, count: int, purpose: Purpose) -> tuple[BoundRow, ...]:
        """Return what every rank runs, transfers included."""
        known = self._rows.get((count, purpose))
        if known is None:
            known = self._rows[count, purpose] = self._bound(count, purpose)
        return known

    def _bound(self, count: int, purpose: Purpose) -> tuple[BoundRow, ...]:
        schedule = self._fitted(count)
        if purpose is Purpose.DIFFERENTIATE:
            schedule = forwards_first(schedule)
        if purpose.builds_graph:
            schedule = insert_recompute(schedule, self._recompute)
        else:
            schedule = forward_part(schedule)
        schedule = order_transfers(schedule)
        return tuple(bind(schedule, rank) for rank in range(schedule.num_ranks))


def halves(row: BoundRow) -> tuple[BoundRow, BoundRow]:
    """Cut a row of ``forwards_first`` into its forward and its backward half."""

    def part(wanted: bool) -> BoundRow:
        kept = [index for index, action in enumerate(row.actions) if _is_forward(action) is wanted]
        return BoundRow(
            row.rank,
            tuple(row.actions[index] for index in kept),
            tuple(row.steps[index] for index in kept),
        )

    return part(True), part(False)


def _is_forward(action: Action) -> bool:
    return action.kind in _FORWARD_KINDS
