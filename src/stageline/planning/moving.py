"""Better cuts from a good one: single blocks move to the stage next to theirs while that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Sizes = tuple[int, ...]
Times = Sequence[NDArray[np.int64]]
Excess = Callable[[int, Sequence[int]], int]
"""Rank and where every stage ends -> by how many bytes the rank is too full."""

_MOST_TRIES = 3000
"""Moves that are looked at; enough for hundreds of stages that are nearly even."""


def neighbours(sizes: Sequence[int]) -> list[Sizes]:
    """Return the cuts in which one block has moved to the stage next to its own.

    Example:
        >>> neighbours([2, 2, 1])
        [(3, 1, 1), (1, 3, 1), (2, 1, 2)]
    """
    found = []
    for left in range(len(sizes) - 1):
        for step in (-1, 1):
            one, other = sizes[left] - step, sizes[left + 1] + step
            if one and other:
                found.append((*sizes[:left], one, other, *sizes[left + 2 :]))
    return found


def improved(
    sizes: Sizes, times: Times, placement: Sequence[int], excess: Excess | None = None
) -> Sizes:
    """Return a cut with less too much memory; of those, whose busiest rank has less to do.

    Example:
        >>> times = np.array([0, 5, 6, 7, 8, 9, 10])           # the first block takes as long
        >>> improved((2, 1, 1, 2), [times] * 4, [0, 1, 1, 0])  # as all others together
        (1, 2, 2, 1)

    Args:
        sizes: How many blocks each stage has.
        times: For each stage, running sums of the time that blocks take there.
        placement: The rank of each stage.
        excess: What ranks hold above a limit; None for no limit.
    """
    state = _State.of(sizes, times, placement, excess)
    tries = 0
    while tries < _MOST_TRIES:
        for moved in state.moves():
            tries += 1
            if moved.badness < state.badness:
                state = moved
                break
        else:
            break
    return tuple(np.diff(state.ends).tolist())


@dataclass(frozen=True)
class _State:
    """A cut, and what it means for the ranks."""

    ends: tuple[int, ...]
    busy: NDArray[np.float64]
    above: NDArray[np.int64]
    times: Times
    placement: Sequence[int]
    excess: Excess | None

    @classmethod
    def of(
        cls,
        sizes: Sizes,
        times: Times,
        placement: Sequence[int],
        excess: Excess | None,
    ) -> _State:
        ends = (0, *accumulate(sizes))
        work = [
            float(time[b] - time[a]) for time, (a, b) in zip(times, pairwise(ends), strict=True)
        ]
        busy = np.bincount(np.array(placement), weights=work).astype(np.float64)
        ranks = range(len(busy))
        above = [0 if excess is None else excess(rank, ends) for rank in ranks]
        return cls(ends, busy, np.array(above, dtype=np.int64), times, placement, excess)

    @property
    def badness(self) -> tuple[int, float, float]:
        """What is too much; how long the busiest rank works; how uneven all are."""
        return int(self.above.sum()), float(self.busy.max()), float(self.busy @ self.busy)

    def moves(self) -> Iterator[_State]:
        """Yield the cuts a block away, of ranks that hold too much or, if none does, work longest.

        Away from such a rank first.
        """
        hot = self.above > 0 if self.above.any() else self.busy == self.busy.max()
        for place in range(1, len(self.ends) - 1):
            left, right = hot[self.placement[place - 1]], hot[self.placement[place]]
            if left or right:
                for step in (-1, 1) if left else (1, -1):
                    end = self.ends[place] + step
                    if self.ends[place - 1] < end < self.ends[place + 1]:
                        yield self._moved(place, end)

    def _moved(self, place: int, end: int) -> _State:
        """Return the state with another end of the stage before a place."""
        ends = (*self.ends[:place], end, *self.ends[place + 1 :])
        left, right = self.placement[place - 1], self.placement[place]
        before, after = self.times[place - 1], self.times[place]
        old = self.ends[place]
        busy, above = self.busy.copy(), self.above
        busy[left] += float(before[end] - before[old])
        busy[right] -= float(after[end] - after[old])
        if self.excess is not None:
            above = above.copy()
            for rank in {left, right}:
                above[rank] = self.excess(rank, ends)
        return _State(ends, busy, above, self.times, self.placement, self.excess)
