"""In which order can the actions run? A walk that finds one, or explains the deadlock.

Every rank runs its row strictly in order. The walk follows the waits: where a rank must wait, it
goes to the rank that owes the value, and comes back when the value is there. The ranks on its way
thus form a trail, each waiting for the next; if the trail bites its tail, they wait for ever.

It needs no costs: whether a schedule can run does not depend on how long its actions take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def walk(work: Work) -> Walk:
    """Run every action after those that it waits for.

    >>> from stageline.scheduling.text import parse
    >>> walk(Work.of(parse("0F0 0B0 0F1 0B1 \\n 1F0 1F1 1B0 1B1"))).deadlock
    'deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1'
    """
    waits: list[int] = work.waits.tolist()
    gates = work.gates
    rank_of: list[int] = work.ranks.tolist()
    position = list(work.bounds[:-1])
    sequence: list[int] = []

    # Negative indices count from the end: the two extra places answer for NOTHING and MISSING.
    done = bytearray(len(waits) + 2)
    done[NOTHING] = True
    done[MISSING] = False

    def wanted(rank: int) -> int:
        """Return what the rank waits for, NOTHING if it can go on."""
        index = position[rank]
        for owed in (waits[index], gates.get(index, NOTHING)):
            if not done[owed]:
                return owed
        return NOTHING

    for beginning in range(len(position)):
        trail = [beginning]
        on_trail = {beginning}
        while trail:
            rank = trail[-1]
            index, end = position[rank], work.bounds[rank + 1]
            while index < end and done[waits[index]] and done[gates.get(index, NOTHING)]:
                done[index] = True
                index += 1
            sequence.extend(range(position[rank], index))
            position[rank] = index
            # Back as soon as the rank before can go on, however much is left to do here.
            if index == end or (len(trail) > 1 and wanted(trail[-2]) == NOTHING):
                on_trail.discard(trail.pop())
                continue
            owed = wanted(rank)
            if owed == MISSING:
                text = f"deadlock: {_waiting(work, rank, index, owed)}, which no rank runs"
                return Walk(sequence, text)
            owing = rank_of[owed]
            if owing in on_trail:
                circle = trail[trail.index(owing) :]
                return Walk(sequence, _explain(work, circle, position, wanted))
            trail.append(owing)
            on_trail.add(owing)
    return Walk(sequence, None)


def _explain(
    work: Work, circle: list[int], position: Sequence[int], wanted: Callable[[int], int]
) -> str:
    """Say who waits for whom, from the lowest rank on."""
    first = circle.index(min(circle))
    ranks = circle[first:] + circle[:first]
    return "deadlock: " + ", ".join(
        _waiting(work, rank, position[rank], wanted(rank)) for rank in ranks
    )


def _waiting(work: Work, rank: int, index: int, wanted: int) -> str:
    return f"rank {rank} waits at {work.text(index)} for {work.wanted_text(index, wanted)}"
