"""Where does each action stand? An index over the rows of a schedule, for checks.

The actions are grouped by stage and kind: "all sends of F by stage 2" is one look-up. A schedule
that is about to be checked may have any hole, so nothing here allocates by the largest number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stageline.scheduling.action import Kind, action_text
from stageline.scheduling.schedule import NO_PEER, Row, Schedule

Integers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Group:
    """The actions of one kind by one stage.

    Attributes:
        microbatches: Ascending, each once.
        places: Where the first action of each microbatch stands: an index into all rows.
        counts: How often each stands there.
    """

    microbatches: Integers
    places: Integers
    counts: Integers

    def at(self, microbatches: Integers) -> Integers:
        """Return the places of microbatches that are all in the group."""
        return self.places[np.searchsorted(self.microbatches, microbatches)]


_NONE = Group(*(np.empty(0, dtype=np.int64) for _ in range(3)))


@dataclass(frozen=True, eq=False)
class Ledger:
    """All actions of a schedule, by stage and kind.

    Attributes:
        rows: The actions of all ranks laid end to end, transfers included.
        ranks: The rank of each action.
        groups: The actions of each stage and kind.
        holders: The ranks that compute each stage: one, if all is well.
    """

    rows: Row
    ranks: Integers
    groups: dict[tuple[int, Kind], Group]
    holders: dict[int, list[int]]

    @classmethod
    def of(cls, schedule: Schedule) -> Ledger:
        rows = np.concatenate(schedule.arrays)
        ranks = np.repeat(np.arange(schedule.num_ranks), [len(row) for row in schedule.arrays])
        return cls(rows, ranks, dict(_groups(rows)), _holders(rows, ranks))

    def group(self, stage: int, *kinds: Kind) -> Group:
        """Return the actions of one stage, of one kind or of several taken together."""
        found = [self.groups[stage, kind] for kind in kinds if (stage, kind) in self.groups]
        if len(found) < 2:
            return found[0] if found else _NONE
        microbatches = np.concatenate([group.microbatches for group in found])
        places = np.concatenate([group.places for group in found])
        order = np.lexsort((places, microbatches))
        return _merge(microbatches[order], places[order])

    def inverted(self, first: Group, second: Group) -> list[tuple[int, int]]:
        """Return the places of all pairs on one rank whose second action stands first."""
        common = both(first.microbatches, second.microbatches)
        earlier, later = first.at(common), second.at(common)
        wrong = (later < earlier) & (self.ranks[earlier] == self.ranks[later])
        return list(zip(earlier[wrong].tolist(), later[wrong].tolist(), strict=True))

    def text(self, place: int) -> str:
        """Return the text form of an action."""
        kind, stage, microbatch, peer = self.rows[place].tolist()
        return action_text(kind, stage, microbatch, None if peer == NO_PEER else peer)

    def where(self, place: int) -> str:
        """Return rank and text form of an action, to begin a message with."""
        return f"rank {self.ranks[place]}: {self.text(place)}"


def actions_text(stage: int, kind: Kind, microbatches: Integers, peer: int | None = None) -> str:
    """Name several actions of one kind, runs of microbatches shortened.

    >>> actions_text(2, Kind.FORWARD, np.array([0, 3, 4, 5]))
    '2F0, 2F3 .. 2F5'
    """
    texts = []
    for run in runs(microbatches):
        first, last = (action_text(kind, stage, end, peer) for end in (run[0], run[-1]))
        texts.append(first if len(run) == 1 else f"{first} .. {last}")
    return ", ".join(texts)


def both(first: Integers, second: Integers) -> Integers:
    """Return the numbers that are in both; all ascend without repeating."""
    return np.intersect1d(first, second, assume_unique=True)


def only(first: Integers, second: Integers) -> Integers:
    """Return the numbers that are in the first alone; all ascend without repeating."""
    return np.setdiff1d(first, second, assume_unique=True)


def runs(numbers: Integers) -> list[Integers]:
    """Cut ascending numbers into runs without a hole."""
    if not len(numbers):
        return []
    return list(np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1))


def _groups(rows: Row) -> Iterator[tuple[tuple[int, Kind], Group]]:
    order = np.lexsort((rows["microbatch"], rows["kind"], rows["stage"]))  # stable
    kind, stage, microbatch = (rows[name][order] for name in ("kind", "stage", "microbatch"))
    changes = (np.diff(stage) != 0) | (np.diff(kind.astype(np.int64)) != 0)
    begins = [0, *(np.flatnonzero(changes) + 1).tolist()] if len(rows) else []
    for begin, end in zip(begins, [*begins[1:], len(rows)], strict=False):
        key = (int(stage[begin]), Kind(int(kind[begin])))
        yield key, _merge(microbatch[begin:end].astype(np.int64), order[begin:end])


def _holders(rows: Row, ranks: Integers) -> dict[int, list[int]]:
    computes = rows["kind"] <= Kind.RECOMPUTE
    num_ranks = int(ranks.max(initial=0)) + 1
    pairs = np.unique(rows["stage"][computes].astype(np.int64) * num_ranks + ranks[computes])
    holders: dict[int, list[int]] = {}
    for pair in pairs.tolist():
        holders.setdefault(pair // num_ranks, []).append(pair % num_ranks)
    return holders


def _merge(microbatches: Integers, places: Integers) -> Group:
    """Make a group of microbatches that ascend but may repeat, the first place first."""
    unique, first, counts = np.unique(microbatches, return_index=True, return_counts=True)
    return Group(unique, places[first], counts)
