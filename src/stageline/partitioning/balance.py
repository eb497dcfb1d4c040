"""Cut a chain into contiguous parts so that the costliest part is as cheap as possible.

Two questions in a row, each answered exactly: how cheap can the costliest part be, and, of all
cuts that reach it, which is the most even?

    items    0   1   2   3   4
    places   0   1   2   3   4   5        a part runs from one place to a later one;
                                          part p from a to b costs heads[p][b] - tails[p][a]

With running sums of the items as heads and tails a part costs the sum of its items. What it costs
to receive at a place is taken off the tails, what it costs to send is added to the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

_Places = NDArray[np.int64]
_Starts = NDArray[np.intp]
_Number = TypeVar("_Number", np.int64, np.float64)

_NEVER = -(2**62)
# The most even cut looks at every part that keeps the limit. Above so many of them (2,000 items in
# 2 parts, 5,000 in 256) parts near the average are taken instead: as cheap, perhaps less even.
_MOST_PARTS = 4_000_000
_MOST_STEPS = 400_000_000


@dataclass(frozen=True)
class Problem:
    """What parts cost, and how long they may be.

    Attributes:
        heads: For each part, a number per place: see the picture above.
        tails: The same for the place where the part begins.
        earliest: For each part, the first place where it may begin if it ends at a place; None if
            nothing is limited.
    """

    heads: Sequence[_Places]
    tails: Sequence[_Places]
    earliest: Sequence[_Starts] | None = None

    @cached_property
    def has_rising_tails(self) -> list[bool]:
        """Whether a part that begins later never costs more, for each part."""
        known = {id(tails): bool((np.diff(tails) >= 0).all()) for tails in self.tails}
        return [known[id(tails)] for tails in self.tails]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], _Starts]:
        return {}

    def cheap_from(self, part: int, most: int) -> _Starts:
        """Return, for every end, the first place before which all beginnings cost more."""
        heads, tails = self.heads[part], self.tails[part]
        key = (most, id(heads), id(tails))
        if key not in self._known:  # many parts have the same tables
            self._known[key] = np.searchsorted(np.maximum.accumulate(tails), heads - most)
        return self._known[key]

    @property
    def num_parts(self) -> int:
        return len(self.heads)

    @property
    def num_items(self) -> int:
        return len(self.heads[0]) - 1


def balance(costs: Sequence[int], num_parts: int) -> list[int]:
    """Return how many items each part gets; no part is empty.

    Example:
        >>> balance([1, 2, 3, 4, 5, 6], 2)     # 10 and 11: no cut has a smaller largest part
        [4, 2]
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"{len(costs)} items cannot make {num_parts} parts that are not empty")
    ends = [running_sum(costs)] * num_parts
    sizes = solve(Problem(ends, ends))
    assert sizes is not None  # nothing is limited
    return sizes


def running_sum(values: Sequence[int]) -> _Places:
    """Return the sum of the values before each place."""
    return np.array([0, *accumulate(values)], dtype=np.int64)


def solve(problem: Problem) -> list[int] | None:
    """Return how many items each part gets, or None if no cut keeps parts as short as they must."""
    if not has_solution(problem):
        return None
    low = _cheapest(problem)
    width = _longest_part(problem, low)
    parts = width * problem.num_items
    if parts > _MOST_PARTS or parts * problem.num_parts > _MOST_STEPS:
        return _near_average(problem, low)
    return _most_even(problem, low, width)


def has_solution(problem: Problem) -> bool:
    """Whether some cut keeps parts as short as they must be."""
    return _is_possible(problem, _most_of_any(problem))


def earliest_begins(heads: _Places, tails: _Places, limit: int) -> _Starts:
    """Return, for every end, the first place from which on a part weighs no more than the limit.

    A part from a to b weighs ``heads[b] - tails[a]``. Where a shorter part weighs more, the longer
    ones are not allowed either.

    Example:
        >>> sums = running_sum([3, 1, 2])
        >>> earliest_begins(sums, sums, limit=3).tolist()
        [0, 0, 1, 1]
    """
    rising = np.minimum.accumulate(tails[::-1])[::-1]
    return np.searchsorted(rising, heads - limit)


def _most_of_any(problem: Problem) -> int:
    highest = max(int(head.max()) for head in problem.heads)
    return highest - min(int(tail.min()) for tail in problem.tails)


def _cheapest(problem: Problem) -> int:
    """Return how cheap the costliest part can be."""
    total = int(problem.heads[-1][-1] - problem.tails[0][0])
    low, high = max(0, -(-total // problem.num_parts)), _most_of_any(problem)
    if problem.earliest is not None:  # looking at fewer cuts cannot make it cheaper
        low = _cheapest(replace(problem, earliest=None))
        high = _first_possible(problem, low, high)
    while low < high:
        middle = (low + high) // 2
        if _is_possible(problem, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _first_possible(problem: Problem, low: int, high: int) -> int:
    """Return a limit that some cut keeps, near the one that none would beat."""
    limit, step = low, max(low // 1000, 1)
    while limit < high and not _is_possible(problem, limit):
        limit, step = min(limit + step, high), 2 * step
    return limit


def _is_possible(problem: Problem, most: int) -> bool:
    """Whether some cut has no part that costs more."""
    reached = _start(problem)
    for part in range(problem.num_parts):
        reached = _ends_of(problem, part, reached, most)
        if not reached.any():
            return False
    return bool(reached[-1])


def _start(problem: Problem) -> NDArray[np.bool_]:
    reached = np.zeros(problem.num_items + 1, dtype=np.bool_)
    reached[0] = True
    return reached


def _ends_of(
    problem: Problem, part: int, begins: NDArray[np.bool_], most: int
) -> NDArray[np.bool_]:
    """Return the places where a part can end that begins at one of these places.

    For each end, the cheapest beginning is the one with the highest tail, so one maximum over all
    earlier places decides; with a limit, over those places that are near enough.
    """
    ends = np.zeros_like(begins)
    wanted = problem.heads[part][1:] - most
    if problem.earliest is None:
        tails = np.where(begins, problem.tails[part], _NEVER)
        ends[1:] = np.maximum.accumulate(tails)[:-1] >= wanted
        return ends
    first = np.maximum(problem.earliest[part][1:], problem.cheap_from(part, most)[1:])
    if problem.has_rising_tails[part]:
        # All places from some on are cheap enough: is one of them a beginning?
        count = np.concatenate([[0], np.cumsum(begins)])
        places = np.arange(len(first))
        ends[1:] = count[places + 1] > count[np.minimum(first, places + 1)]
        return ends
    # Nothing ends before the first beginning, nor where a part would have to begin after the last.
    low, last = int(begins.argmax()), len(begins) - 1 - int(begins[::-1].argmax())
    stop = len(first) - int((first[::-1] <= last).argmax())
    tails = np.where(begins[low:stop], problem.tails[part][low:stop], _NEVER)
    highest = _highest_between(tails, np.maximum(first[low:stop] - low, 0))
    ends[low + 1 : stop + 1] = highest >= wanted[low:stop]
    return ends


def _highest_between(values: _Places, first: NDArray[np.intp]) -> _Places:
    """Return the maximum of ``values[first[i] : i + 1]`` for each i; empty ranges have none.

    Maxima over 1, 2, 4, .. neighbours are made once; two of them cover any range.
    """
    count = len(first)
    last = np.arange(count)
    lengths = last - first + 1
    level, reach = values[:count], 1
    levels = [level]
    while 2 * reach <= lengths.max(initial=0):
        level, reach = np.maximum(level[:-reach], level[reach:]), 2 * reach
        levels.append(np.concatenate([level, values[: count - len(level)]]))
    which = np.frexp(np.maximum(lengths, 1))[1] - 1
    table, row = np.concatenate(levels), which * count
    highest: _Places = np.maximum(
        table[row + np.minimum(first, last)], table[row + last + 1 - np.left_shift(1, which)]
    )
    highest[lengths < 1] = _NEVER
    return highest


def _longest_part(problem: Problem, most: int) -> int:
    """Return how many items a part can have at most."""
    places = np.arange(problem.num_items + 1)
    longest, cheap = 1, places
    for part in range(problem.num_parts):
        if part == 0 or not _costs_like_the_last(problem, part):
            cheap = problem.cheap_from(part, most)
        first = cheap if problem.earliest is None else np.maximum(cheap, problem.earliest[part])
        longest = max(longest, int((places - first).max()))
    return longest


def _most_even(problem: Problem, most: int, width: int) -> list[int]:
    """Return the cut with no part above the limit whose squares of costs and of lengths are least.

    ``best[i]`` is the least sum over the first i items in the parts so far; lengths only break
    ties, so that items that cost nothing do not all gather in one part. Column j of every table
    is the part of ``width - j`` items that ends at the row's place.
    """
    lengths = np.arange(width, 0, -1)
    by_length = 1e-9 * (lengths / problem.num_items) ** 2
    best = np.where(_start(problem), 0.0, np.inf)
    came_from = []
    badness = np.empty(0)
    for part in range(problem.num_parts):
        if part == 0 or not _costs_like_the_last(problem, part):
            badness = _squares(problem, part, most, width) + by_length
        total = _windows(best, width, np.inf) + badness
        if problem.earliest is not None:
            # The j-th column of a row is the place ``row - width + j``.
            shortest = problem.earliest[part] - np.arange(-width, problem.num_items + 1 - width)
            total[np.arange(width) < shortest[:, None]] = np.inf
        came_from.append(total.argmin(axis=1))
        best = np.take_along_axis(total, came_from[-1][:, None], axis=1)[:, 0]
    assert np.isfinite(best[-1])  # the limit was found by a cut that keeps it

    sizes, stop = [], problem.num_items
    for choices in reversed(came_from):
        sizes.append(width - int(choices[stop]))
        stop -= sizes[-1]
    return sizes[::-1]


def _squares(problem: Problem, part: int, most: int, width: int) -> NDArray[np.float64]:
    """Return the square of the cost of every part, infinite for those that cost too much."""
    costs = problem.heads[part][:, None] - _windows(problem.tails[part], width, _NEVER)
    scale = max(float(most), 1.0)
    return np.where(costs <= most, (costs / scale) ** 2, np.inf)


def _windows(values: NDArray[_Number], width: int, outside: float) -> NDArray[_Number]:
    """Return for each place the values at the ``width`` places before it, farthest first."""
    padded = np.concatenate([np.full(width, outside, dtype=values.dtype), values[:-1]])
    return sliding_window_view(padded, width)


def _costs_like_the_last(problem: Problem, part: int) -> bool:
    tables = (problem.heads, problem.tails)
    return all(table[part] is table[part - 1] for table in tables)


def _near_average(problem: Problem, most: int) -> list[int]:
    """Return a cut with no part above the limit, each near the average of what is left of it."""
    reached = [_start(problem)]
    for part in range(problem.num_parts):
        reached.append(_ends_of(problem, part, reached[-1], most))
    sizes, stop = [], problem.num_items
    for part in reversed(range(problem.num_parts)):
        tails = problem.tails[part][:stop]
        costs = problem.heads[part][stop] - tails
        allowed = reached[part][:stop] & (costs <= most)
        if problem.earliest is not None:
            allowed &= np.arange(stop) >= problem.earliest[part][stop]
        average = (problem.heads[part][stop] - tails[0]) / (part + 1)
        begin = int(np.where(allowed, np.abs(costs - average), np.inf).argmin())
        sizes.append(stop - begin)
        stop = begin
    return sizes[::-1]
