"""What waits for what: the actions of all ranks laid end to end, each with the one it waits for.

    F(s) waits for F(s-1)        B(s) or I(s) waits for B(s+1) or I(s+1)

and, on its own rank, a backward or recompute follows its forward and W follows I. The own rank's
order is kept by the row itself, so one index per action is enough to say the whole graph.

    rank 0   0F0 0F1 0B0 0B1   waits for   -   -   5   7        (index of 1B0, of 1B1)
    rank 1   1F0 1B0 1F1 1B1               0   -   1   -        (index of 0F0, of 0F1)

The two actions of a pair (0F7&7B3) run as one, so its forward also waits for what its backward
needs: the gate of that forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stageline.errors import ScheduleError
from stageline.scheduling.action import LARGEST, LETTERS, Kind, action_text
from stageline.scheduling.schedule import Row, Schedule

Integers: TypeAlias = npt.NDArray[np.integer[Any]]
Booleans: TypeAlias = npt.NDArray[np.bool_]

NOTHING = -1
"""In ``Work.waits``: the action can run as soon as its rank is free."""

MISSING = -2
"""In ``Work.waits``: no rank runs the action that it waits for."""


@dataclass(frozen=True, eq=False)
class Work:
    """The actions of all ranks but the transfers, laid end to end in rank order.

    Attributes:
        rows: The actions.
        bounds: Rank r runs the actions ``bounds[r]:bounds[r + 1]``.
        ranks: The rank of each action.
        waits: The index of the action that each waits for, or NOTHING, or MISSING.
        num_stages: As in the schedule.
        pairs: The index of the forward of each pair; its backward comes next.
        gates: For those of them whose backward waits for anything, the index of that.
    """

    rows: Row
    bounds: tuple[int, ...]
    ranks: Integers
    waits: Integers
    num_stages: int
    pairs: tuple[int, ...] = ()
    gates: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule, *, forgiving: bool = False) -> Work:
        """Lay out a schedule.

        Args:
            schedule: Any schedule, also one that cannot run.
            forgiving: Whether to leave out waits for what is missing or stands too late in the
                action's own row; what is left is how the ranks hold up each other.

        Raises:
            ScheduleError: Most of it is missing; ``schedule.check()`` says what.
        """
        if is_sparse(schedule):
            raise ScheduleError(
                f"{schedule.num_stages} stages x {schedule.num_microbatches} microbatches need as "
                f"many forward actions, the rows hold {len(schedule)} actions in all: "
                f"call check() for what is missing"
            )
        if len(schedule) > LARGEST:
            raise ScheduleError(f"{len(schedule)} actions are more than the {LARGEST} that fit")
        if any(row["kind"].max(initial=0) >= Kind.SEND_FORWARD for row in schedule.arrays):
            schedule = schedule.compute_only()
        rows = np.concatenate(schedule.arrays)
        sizes = [len(row) for row in schedule.arrays]
        table = _Table.of(rows, schedule.num_stages, schedule.num_microbatches)
        waits = np.empty(len(rows), dtype=INDEX)
        for part in _blocks(len(rows)):
            waits[part] = table.waits(rows[part])
            if forgiving:
                waits[part][waits[part] == MISSING] = NOTHING
                continue
            # What the own rank owes is kept by the order of its row. Where the row has it wrong,
            # the action waits for that instead, and so for ever.
            owed = table.owed(rows[part])
            never = (owed > np.arange(part.start, part.stop)) | (owed == MISSING)
            waits[part][never] = owed[never]
        bounds = (0, *np.cumsum(sizes).tolist())
        firsts = zip(bounds, schedule.pairs, strict=False)
        pairs = tuple(at for first, positions in firsts for at in (first + positions).tolist())
        return cls(
            rows=rows,
            bounds=bounds,
            ranks=np.repeat(np.arange(len(sizes), dtype=INDEX), sizes),
            waits=waits,
            num_stages=schedule.num_stages,
            pairs=pairs,
            gates={at: int(waits[at + 1]) for at in pairs if waits[at + 1] >= 0},
        )

    def parts(self) -> list[slice]:
        """Return which of the actions each rank runs."""
        return [slice(begin, end) for begin, end in pairwise(self.bounds)]

    def crossing(self) -> Booleans:
        """Return, for each action, whether it waits for one of another rank."""
        crosses = np.empty(len(self.waits), dtype=bool)
        for part in _blocks(len(self.waits)):
            waits = self.waits[part]
            # NOTHING and MISSING pick some rank from the end; the first condition drops them.
            crosses[part] = (waits >= 0) & (self.ranks[waits] != self.ranks[part])
        return crosses

    def text(self, index: int) -> str:
        """Return the text form of one action."""
        kind, stage, microbatch, _ = self.rows[index].tolist()
        return action_text(kind, stage, microbatch)

    def wanted_text(self, index: int, wanted: int) -> str:
        """Return the text form of what one action waits for, also where it is missing."""
        if wanted >= 0:
            return self.text(wanted)
        kind, stage, microbatch, _ = self.rows[index].tolist()
        if kind == Kind.FORWARD:
            return action_text(Kind.FORWARD, stage - 1, microbatch)
        if kind == Kind.WEIGHT_GRADIENT:
            return action_text(Kind.INPUT_GRADIENT, stage, microbatch)
        is_own_forward = kind == Kind.RECOMPUTE or not self._has_forward(stage, microbatch)
        if is_own_forward:
            return action_text(Kind.FORWARD, stage, microbatch)
        return action_text(kind, stage + 1, microbatch)

    def _has_forward(self, stage: int, microbatch: int) -> bool:
        rows = self.rows
        same = (rows["stage"] == stage) & (rows["microbatch"] == microbatch)
        return bool((same & (rows["kind"] == Kind.FORWARD)).any())


def is_sparse(schedule: Schedule) -> bool:
    """Return whether a schedule has far fewer actions than its numbers call for.

    The tables below have one slot per stage and microbatch, which a complete schedule fills. One
    slip such as ``0F999999999`` must not allocate gigabytes.
    """
    return schedule.num_stages * schedule.num_microbatches > 1000 + 8 * len(schedule)


INDEX = np.int32
"""The type of indices: half the memory of the usual one, and good for two billion actions."""

BLOCK = 2**18
"""How many actions are looked up at a time: few enough for the cache, and to reuse memory."""


def _blocks(size: int) -> list[slice]:
    return [slice(begin, min(begin + BLOCK, size)) for begin in range(0, size, BLOCK)]


@dataclass(frozen=True, eq=False)
class _Table:
    """Where everything stands that can be waited for, by stage and microbatch.

    What has nothing to wait for looks up a place that holds NOTHING, so that no action is a
    special case; ``m`` is the number of microbatches, G is B or I.

        0         1 .. m          m + 1 ..          gradient ..      beyond .. + m
        NOTHING   F of stage -1   F of all stages   G of all stages  G of stage num_stages
                  NOTHING                                            NOTHING

    Attributes:
        at: The index of the first action of each place, NOTHING, or MISSING.
        num_microbatches: As in the schedule.
        gradient: Where the places of gradients begin.
    """

    at: Integers
    num_microbatches: int
    gradient: int

    @classmethod
    def of(cls, rows: Row, num_stages: int, num_microbatches: int) -> _Table:
        forward = 1 + num_microbatches
        gradient = forward + num_stages * num_microbatches
        beyond = gradient + num_stages * num_microbatches
        at = np.full(beyond + num_microbatches, MISSING, dtype=INDEX)
        table = cls(at, num_microbatches, gradient)
        # Backwards, so that the first of several is the last to be written.
        for part in reversed(_blocks(len(rows))):
            places = table.places(rows[part], F=forward, B=gradient, I=gradient)
            at[places[::-1]] = np.arange(part.start, part.stop)[::-1]
        at[:forward] = at[beyond:] = NOTHING
        return table

    def waits(self, rows: Row) -> Integers:
        """Return what actions wait for, of another stage."""
        before, after = 1, self.gradient + self.num_microbatches
        return self.at[self.places(rows, F=before, B=after, I=after)]

    def owed(self, rows: Row) -> Integers:
        """Return what actions wait for, of their own stage."""
        forward = 1 + self.num_microbatches
        return self.at[self.places(rows, B=forward, I=forward, R=forward, W=self.gradient)]

    def places(self, rows: Row, **begins: int) -> Integers:
        """Return a place for each action, given where those of its kind begin; 0 unless given."""
        begin = np.array([begins.get(letter, 0) for letter in LETTERS], dtype=np.int64)[
            rows["kind"]
        ]
        slot = rows["stage"] * np.int64(self.num_microbatches) + rows["microbatch"]
        return np.where(begin, begin + slot, 0)
