"""In which order can the actions run? A walk that finds one, or explains the deadlock.

Every rank runs its row strictly in order. The walk follows the waits: where a rank must wait, it
goes to the rank that owes the value, and comes back when the value is there. The ranks on its way
thus form a trail, each waiting for the next; if the trail bites its tail, they wait for ever.

It needs no costs: whether a schedule can run does not depend on how long its actions take.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageline.scheduling.work import MISSING, NOTHING, Work


@dataclass(frozen=True)
class Walk:
    """An order in which a schedule can run.

    Attributes:
        sequence: The indices of the actions; each stands after all that it waits for.
        deadlock: Why the sequence is not complete, None when it is.
    """

    sequence: list[int]
    deadlock: str | None


class _Ranks:
    """How far each rank has come."""

    def __init__(self, work: Work) -> None:
        self.position = list(work.bounds[:-1])
        self._ends = work.bounds[1:]
        self._waits: list[int] = work.waits.tolist()
        self._gates = work.gates
        # Negative indices count from the end: the extra places answer for NOTHING and MISSING.
        self._done = bytearray(len(self._waits) + 2)
        self._done[NOTHING] = True
        self._done[MISSING] = False

    def advance(self, rank: int) -> range:
        """Run all that the rank can run now, and return it."""
        done, waits, gates = self._done, self._waits, self._gates
        begin, end = self.position[rank], self._ends[rank]
        index = begin
        while index < end and done[waits[index]]:
            if gates and not done[gates.get(index, NOTHING)]:
                break
            done[index] = True
            index += 1
        self.position[rank] = index
        return range(begin, index)

    def is_done(self, rank: int) -> bool:
        return self.position[rank] == self._ends[rank]

    def wanted(self, rank: int) -> int:
        """Return what the rank waits for, NOTHING if it can go on."""
        index = self.position[rank]
        owed = self._waits[index]
        if self._done[owed] and self._gates:
            owed = self._gates.get(index, NOTHING)
        return NOTHING if self._done[owed] else owed


def walk(work: Work) -> Walk:
    """Run every action after those that it waits for.

    >>> from stageline.scheduling.text import parse
    >>> walk(Work.of(parse("0F0 0B0 0F1 0B1 \\n 1F0 1F1 1B0 1B1"))).deadlock
    'deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1'
    """
    ranks = _Ranks(work)
    rank_of: list[int] = work.ranks.tolist()
    sequence: list[int] = []
    for beginning in range(len(ranks.position)):
        trail = [beginning]
        on_trail = {beginning}
        while trail:
            rank = trail[-1]
            sequence.extend(ranks.advance(rank))
            # Back as soon as the rank before can go on, however much is left to do here.
            if ranks.is_done(rank) or (len(trail) > 1 and ranks.wanted(trail[-2]) == NOTHING):
                on_trail.discard(trail.pop())
                continue
            owed = ranks.wanted(rank)
            if owed == MISSING:
                text = f"deadlock: {_waiting(work, ranks, rank)}, which no rank runs"
                return Walk(sequence, text)
            owing = rank_of[owed]
            if owing in on_trail:
                circle = trail[trail.index(owing) :]
                return Walk(sequence, _explain(work, ranks, circle))
            trail.append(owing)
            on_trail.add(owing)
    return Walk(sequence, None)


def _explain(work: Work, ranks: _Ranks, circle: list[int]) -> str:
    """Say who waits for whom, from the lowest rank on."""
    first = circle.index(min(circle))
    ordered = circle[first:] + circle[:first]
    return "deadlock: " + ", ".join(_waiting(work, ranks, rank) for rank in ordered)


def _waiting(work: Work, ranks: _Ranks, rank: int) -> str:
    index = ranks.position[rank]
    wanted = work.wanted_text(index, ranks.wanted(rank))
    return f"rank {rank} waits at {work.text(index)} for {wanted}"
