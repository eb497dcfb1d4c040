"""A schedule as data: for each rank, the row of actions it runs, in order.

Executor, check, simulator and picture all read these rows; nothing else says when something runs.
A row is a numpy array of 13 bytes an action, so that the 17 million actions of a large pipeline
take 220 MB; an ``Action`` object is made only when somebody looks at one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stageline.errors import ScheduleError
from stageline.scheduling.action import Action, Kind

if TYPE_CHECKING:
    from stageline.scheduling.costs import Costs

Row: TypeAlias = npt.NDArray[np.void]

ROW_DTYPE = np.dtype([("kind", "u1"), ("stage", "i4"), ("microbatch", "i4"), ("peer", "i4")])
NO_PEER = -1
NO_RANK = -1


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which rank does what, in which order.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> schedule = one_f_one_b(num_stages=2, num_microbatches=3)
    >>> print(schedule)
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> schedule.num_ranks, schedule.placement, len(schedule)
    (2, (0, 1), 12)
    >>> str(schedule.row(1)[0])
    '1F0'

    Two schedules are equal when their rows are; the name is for people.

    Attributes:
        arrays: One array of dtype ``ROW_DTYPE`` per rank. The schedule takes them over and makes
            them read-only. ``peer`` is -1 where an action has none.
        name: What pictures and messages call it.
    """

    arrays: tuple[Row, ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        if not self.arrays:
            raise ScheduleError("a schedule needs at least one rank: give it a row")
        for rank, row in enumerate(self.arrays):
            if row.dtype != ROW_DTYPE or row.ndim != 1:
                raise ScheduleError(
                    f"rank {rank}: a row is a 1-d array of {ROW_DTYPE}, "
                    f"got {row.ndim}-d {row.dtype}: build it with Schedule.from_rows"
                )
            if _has_impossible_action(row):
                raise ScheduleError(
                    f"rank {rank}: the row holds an action that cannot be written down "
                    f"(negative stage, unknown kind, transfer without peer): "
                    f"build it with Schedule.from_rows, which names it"
                )
            row.flags.writeable = False

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Action]], name: str = "custom") -> Schedule:
        """Build a schedule from one sequence of actions per rank."""
        return cls(tuple(_array(row) for row in rows), name)

    @property
    def num_ranks(self) -> int:
        """How many workers the pipeline has."""
        return len(self.arrays)

    @cached_property
    def num_stages(self) -> int:
        """How many pieces the model is cut into."""
        return 1 + max((int(row["stage"].max()) for row in self.arrays if len(row)), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """How many slices the batch is cut into."""
        return 1 + max(
            (int(row["microbatch"].max()) for row in self.arrays if len(row)), default=-1
        )

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Which rank holds each stage: the one whose row computes it.

        In a schedule that ``check`` refuses, the first of several ranks, and -1 for none.
        """
        rank_of = [NO_RANK] * self.num_stages
        for rank in reversed(range(self.num_ranks)):
            row = self.arrays[rank]
            for stage in np.unique(row["stage"][row["kind"] <= Kind.RECOMPUTE]).tolist():
                rank_of[stage] = rank
        return tuple(rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending."""
        return tuple(stage for stage, at in enumerate(self.placement) if at == rank)

    def row(self, rank: int) -> tuple[Action, ...]:
        """Return what one rank does, as ``Action`` objects."""
        return tuple(
            Action(stage, Kind(kind), microbatch, None if peer == NO_PEER else peer)
            for kind, stage, microbatch, peer in self.arrays[rank].tolist()
        )

    def rows(self) -> Iterator[tuple[Action, ...]]:
        """Yield the row of each rank, as ``Action`` objects."""
        return (self.row(rank) for rank in range(self.num_ranks))

    def kinds(self) -> frozenset[Kind]:
        """Return the kinds of action in use."""
        used = [np.unique(row["kind"]) for row in self.arrays]
        return frozenset(Kind(kind) for array in used for kind in array.tolist())

    @cached_property
    def has_backward(self) -> bool:
        """Whether gradients are computed; False for a forward-only schedule."""
        return not self.kinds().isdisjoint(
            (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        )

    def compute_only(self) -> Schedule:
        """Return the same rows without their transfers."""
        return Schedule(tuple(row[~is_transfer(row)] for row in self.arrays), self.name)

    def check(self) -> Schedule:
        """Return the schedule itself if it can run.

        Raises:
            ScheduleError: It cannot; the message lists every fault.
        """
        from stageline.scheduling.checking import find_faults

        faults = find_faults(self)
        if len(faults) == 1:
            raise ScheduleError(f"schedule {self.name!r}: {faults[0]}")
        if faults:
            bullets = "".join(f"\n- {fault}" for fault in faults)
            raise ScheduleError(f"schedule {self.name!r} has {len(faults)} faults:{bullets}")
        return self

    def text(self) -> str:
        """Return the text form, one line per rank; ``parse`` reads it back."""
        from stageline.scheduling.text import format

        return format(self)

    def picture(
        self, costs: Costs | None = None, *, color: bool = False, width: int | None = None
    ) -> str:
        """Draw what every rank does over time; see ``stageline.scheduling.drawing``."""
        from stageline.scheduling.drawing import picture

        return picture(self, costs, color=color, width=width)

    def __len__(self) -> int:
        """Return the number of actions of all ranks together."""
        return sum(len(row) for row in self.arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self.num_ranks == other.num_ranks and all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(self.arrays, other.arrays, strict=True)
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(row.tobytes() for row in self.arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles go through the constructor, which makes their arrays read-only again.
        return (Schedule, (self.arrays, self.name))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name!r}: {self.num_stages} stages on {self.num_ranks} ranks, "
            f"{self.num_microbatches} microbatches, {len(self)} actions>"
        )


def is_transfer(row: Row) -> npt.NDArray[np.bool_]:
    """Return, for each action of a row, whether it sends or receives."""
    kind = row["kind"]
    transfers: npt.NDArray[np.bool_] = (kind >= Kind.SEND_FORWARD) & (kind <= Kind.RECEIVE_BACKWARD)
    return transfers


def _array(actions: Sequence[Action]) -> Row:
    numbers = [
        (
            action.kind,
            action.stage,
            action.microbatch,
            NO_PEER if action.peer is None else action.peer,
        )
        for action in actions
    ]
    return np.array(numbers, dtype=ROW_DTYPE)


def _has_impossible_action(row: Row) -> bool:
    """Apply the rules of ``Action`` to a whole row at once."""
    peer_is_wrong = (row["peer"] >= 0) != is_transfer(row)
    reduces_one_microbatch = (row["kind"] == Kind.REDUCE) & (row["microbatch"] != 0)
    return bool(
        (row["kind"] > max(Kind)).any()
        or (row["stage"] < 0).any()
        or (row["microbatch"] < 0).any()
        or (row["peer"] < NO_PEER).any()
        or peer_is_wrong.any()
        or reduces_one_microbatch.any()
    )
