"""Place actions one by one, each as early as it can be: the inner loop of the search.

The rule is that of Giffler and Thompson. Of all actions that could be placed now, find the one that
would end first. On its rank, whatever could begin before that end competes with it, and priorities
decide; nothing else on the rank can be hurt, for all that is not known yet comes later. A rank may
thus wait for something urgent rather than begin something long. How long it waits for that is its
patience, in quarters: at 4, up to the end of the first; at 0, it never waits if it could work.

Actions that take room are placed in the order of their priorities where several lines of a rank
compete for it: one placed early would keep the room from the one it was meant for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from stageline.planning.searching.lines import NO_LINE, Lines
from stageline.planning.searching.problem import Tick

Priorities: TypeAlias = Sequence[Sequence[Tick]]
"""For each line, one number for each microbatch; the lowest goes first."""

Choice: TypeAlias = tuple[Tick, Tick, int, Tick]
"""An action that could be placed: when it begins, its priority, its line, when it ends."""

ENDLESS = float("inf")


@dataclass(frozen=True)
class Placed:
    """Where every action was placed.

    Attributes:
        lines: In which lines.
        ends: For each line, when the action of each microbatch ends.
        orders: For each rank, the lines of its actions in the order in which it runs them.
        finish: When each rank is through.
    """

    lines: Lines
    ends: list[list[Tick]]
    orders: list[list[int]]
    finish: list[Tick]

    def figure(self, offsets: Sequence[Tick]) -> Tick:
        """Return the largest sum of a rank's end and its offset."""
        return max(end + offset for end, offset in zip(self.finish, offsets, strict=True))

    def starts(self) -> list[list[Tick]]:
        """Return when every action starts: priorities that lead here again."""
        durations = self.lines.durations
        return [[end - time for end in row] for row, time in zip(self.ends, durations, strict=True)]

    def turned(self) -> list[list[Tick]]:
        """Return priorities for the other direction: what ends last here comes first there."""
        num_stages = self.lines.problem.num_stages
        rows = [[-end for end in reversed(row)] for row in self.ends]
        parts = [rows[at : at + num_stages] for at in range(0, len(rows), num_stages)]
        return [row for part in reversed(parts) for row in part]


class _Placing:
    """How far each line and each rank has come."""

    def __init__(self, lines: Lines, priorities: Priorities) -> None:
        problem = lines.problem
        self.lines, self.priorities = lines, priorities
        self.count = problem.num_microbatches
        self.done = [0] * (len(lines.rank) + 1)
        self.done[NO_LINE] = self.count  # what waits for nothing finds it there
        self.ends: list[list[Tick]] = [[] for _ in lines.rank]
        self.free = list(lines.begin)
        self.room = [ENDLESS if limit is None else limit for limit in problem.limits]
        # For each rank: when its first possible action would end, and all that are possible.
        self.first: list[Tick] = [ENDLESS for _ in lines.begin]
        self.found: list[list[Choice]] = [[] for _ in lines.begin]

    def look(self, rank: int) -> Tick:
        """Find out what a rank could run next; return when the first of it would end."""
        done, count, priorities = self.done, self.count, self.priorities
        free, room = self.free[rank], self.room[rank]
        taker = self._taker(rank) if self.lines.takers[rank] else NO_LINE
        first: Tick = ENDLESS
        found: list[Choice] = []
        for line, before, waits, hop, duration, need in self.lines.of_rank[rank]:
            at = done[line]
            if at >= count or done[before] <= at or done[waits] <= at:
                continue
            if need > 0 and not self._may_take(line, taker, need, room):
                continue
            start = free
            if waits >= 0:
                arrival = self.ends[waits][at] + hop
                if arrival > start:
                    start = arrival
            end = start + duration
            if end < first:
                first = end
            found.append((start, priorities[line][at], line, end))
        self.first[rank], self.found[rank] = first, found
        return first

    def _may_take(self, line: int, taker: int, need: Tick, room: Tick) -> bool:
        """Return whether an action of a line may take room of its rank now."""
        if taker not in (NO_LINE, line):
            return False
        return need <= room or not self.lines.needs[line].exceeds(room, self.done)

    def _taker(self, rank: int) -> int:
        """Return which line may take room next, where several compete."""
        taker, lowest = NO_LINE, ENDLESS
        for line, before in self.lines.takers[rank]:
            at = self.done[line]
            if at < self.count and self.done[before] > at and self.priorities[line][at] < lowest:
                taker, lowest = line, self.priorities[line][at]
        return taker

    def choose(self, rank: int, patience: int) -> Choice:
        """Return which of its possible actions a rank runs."""
        found = self.found[rank]
        if len(found) == 1:
            return found[0]
        first = self.first[rank]
        earliest = min(found)[0]
        until = earliest + (first - earliest) * patience // 4
        best: Choice | None = None
        for choice in found:
            start = choice[0]
            competes = start == earliest or (start < first and start <= until)
            if competes and (best is None or choice[1] < best[1]):
                best = choice
        assert best is not None, "what ends first competes"
        return best


def place(lines: Lines, priorities: Priorities, *, patience: int = 4) -> Placed | None:
    """Place all actions.

    Args:
        lines: The problem, in one of its directions.
        priorities: Which action goes first where several compete.
        patience: How long a rank may wait for one that goes first, 0 to 4.

    Returns:
        Where they were placed, None if these priorities lead to a dead end: no room for what must
        come next.
    """
    state = _Placing(lines, priorities)
    done, ends, following, rank_of = state.done, state.ends, lines.following, lines.rank
    orders: list[list[int]] = [[] for _ in lines.begin]
    heap: list[tuple[Tick, int]] = []
    for rank in range(len(orders)):
        heappush(heap, (state.look(rank), rank))
    left = state.count * len(rank_of)
    while left:
        first, rank = heappop(heap)
        if first == ENDLESS:
            return None
        if first != state.first[rank]:
            continue  # known to be different since
        _, _, line, end = state.choose(rank, patience)
        at = done[line]
        done[line] = at + 1
        ends[line].append(end)
        orders[rank].append(line)
        state.free[rank] = end
        state.room[rank] -= lines.changes[line]
        left -= 1
        heappush(heap, (state.look(rank), rank))
        other = following[line]
        # Only what waited for this very action can begin earlier than was known.
        if other >= 0 and done[other] == at and rank_of[other] != rank:
            before = state.first[rank_of[other]]
            ending = state.look(rank_of[other])
            if ending < before:
                heappush(heap, (ending, rank_of[other]))
    return Placed(lines, ends, orders, state.free)
