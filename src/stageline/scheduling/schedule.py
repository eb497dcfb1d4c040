"""A schedule as data: for each rank, the row of actions it runs, in order.

Executor, check, simulator and picture all read these rows; nothing else says when something runs.
A row is a numpy array of 13 bytes an action, so that the 17 million actions of a large pipeline
take 220 MB; an ``Action`` object is made only when somebody looks at one.

Two things stand beside the rows, for the families that need them:

    pairs      0F7&7B3: a forward and the backward after it that overlap. To the simulator they are
               one action with a time of its own; an executor may run one after the other.
    replicas   how many copies of the model there are. With two, every stage is on two ranks, and
               each microbatch takes one of them; nothing else changes in the rows.
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
Booleans: TypeAlias = npt.NDArray[np.bool_]
Positions: TypeAlias = npt.NDArray[np.int64]

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

    Two schedules are equal when their rows, pairs and replicas are; the name is for people.

    Attributes:
        arrays: One array of dtype ``ROW_DTYPE`` per rank. The schedule takes them over and makes
            them read-only. ``peer`` is -1 where an action has none.
        name: What pictures and messages call it.
        pairs: For each rank, where in its row the forwards stand that overlap with the backward
            right after them, ascending. Empty where no rank has any.
        replicas: How many copies of the model there are, each on ranks of its own choice.
    """

    arrays: tuple[Row, ...]
    name: str = "custom"
    pairs: tuple[Positions, ...] = ()
    replicas: int = 1

    def __post_init__(self) -> None:
        if not self.arrays:
            raise ScheduleError("a schedule needs at least one rank: give it a row")
        if self.replicas < 1:
            raise ScheduleError(f"replicas={self.replicas}: a model has at least one copy")
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
        self._take_pairs()

    def _take_pairs(self) -> None:
        if not any(len(positions) for positions in self.pairs):
            object.__setattr__(self, "pairs", ())
            return
        for rank, (row, positions) in enumerate(zip(self.arrays, self.pairs, strict=True)):
            if not _are_pairs(row, positions):
                raise ScheduleError(
                    f"rank {rank}: a pair is a forward with a backward right after it, as in "
                    f"0F7&7B3, got pairs at {positions.tolist()}"
                )
            positions.flags.writeable = False

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Action]], name: str = "custom") -> Schedule:
        """Build a schedule from one sequence of actions per rank."""
        return cls(tuple(_array(row) for row in rows), name)

    @property
    def refusal(self) -> str | None:
        """Why the schedule can be simulated and drawn but not run; None for all others."""
        return refusal(self.name, self.replicas)

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

        Where there are several copies, the lowest of their ranks. In a schedule that ``check``
        refuses, the first of several ranks, and -1 for none.
        """
        rank_of = [NO_RANK] * self.num_stages
        for rank in reversed(range(self.num_ranks)):
            row = self.arrays[rank]
            for stage in np.unique(row["stage"][row["kind"] <= Kind.RECOMPUTE]).tolist():
                rank_of[stage] = rank
        return tuple(rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending."""
        if self.replicas == 1:
            return tuple(stage for stage, at in enumerate(self.placement) if at == rank)
        row = self.arrays[rank]
        return tuple(np.unique(row["stage"][row["kind"] <= Kind.RECOMPUTE]).tolist())

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
        return self.keep([~is_transfer(row) for row in self.arrays])

    def keep(self, chosen: Sequence[Booleans]) -> Schedule:
        """Return the actions that are chosen, per rank; a pair stays one if both of its are."""
        pairs = []
        for mask, positions in zip(chosen, self.pairs, strict=False):
            kept = positions[mask[positions] & mask[positions + 1]]
            pairs.append(np.cumsum(mask)[kept] - 1)
        rows = (row[mask] for row, mask in zip(self.arrays, chosen, strict=True))
        return Schedule(tuple(rows), self.name, tuple(pairs), self.replicas)

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

    def csv(self) -> str:
        """Return the rows as torch.distributed.pipelining writes them; ``parse`` reads it back."""
        from stageline.scheduling.torch_form import format_csv

        return format_csv(self)

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
        return self.replicas == other.replicas and all(
            len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))
            for mine, theirs in ((self.arrays, other.arrays), (self.pairs, other.pairs))
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(row.tobytes() for row in self.arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles go through the constructor, which makes their arrays read-only again.
        return (Schedule, (self.arrays, self.name, self.pairs, self.replicas))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name!r}: {self.num_stages} stages on {self.num_ranks} ranks, "
            f"{self.num_microbatches} microbatches, {len(self)} actions>"
        )


def refusal(name: str, replicas: int) -> str | None:
    """Return why a schedule that keeps so many copies of the model cannot be run, if so."""
    if replicas == 1:
        return None
    return (
        f"{name} needs {replicas} copies of the weights, on different ranks, and a pipeline here "
        f"keeps one: it can be simulated and drawn, not run; dualpipe-v and zb-v need one"
    )


def is_transfer(row: Row) -> Booleans:
    """Return, for each action of a row, whether it sends or receives."""
    kind = row["kind"]
    transfers: Booleans = (kind >= Kind.SEND_FORWARD) & (kind <= Kind.RECEIVE_BACKWARD)
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


def _are_pairs(row: Row, positions: Positions) -> bool:
    if not len(positions):
        return True
    inside = bool(positions[0] >= 0 and positions[-1] < len(row) - 1)
    if not inside or bool((np.diff(positions) <= 0).any()):
        return False
    kind = row["kind"]
    forward, backward = kind[positions] == Kind.FORWARD, kind[positions + 1] == Kind.BACKWARD
    return bool((forward & backward).all())
