"""Cut a chain of costs into contiguous parts so that the largest part is as small as possible.

Two questions in a row, each answered exactly: how small can the largest part be, and, of all cuts
that reach it, which is the most even?
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np


def balance(costs: Sequence[int], num_parts: int) -> list[int]:
    """Return how many items each part gets; no part is empty.

    Example:
        >>> balance([1, 2, 3, 4, 5, 6], 2)     # 10 and 11: no cut has a smaller largest part
        [4, 2]
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"{len(costs)} items cannot make {num_parts} parts that are not empty")
    ends = [0, *accumulate(costs)]
    return _most_even(ends, num_parts, _smallest_bottleneck(ends, costs, num_parts))


def _smallest_bottleneck(ends: list[int], costs: Sequence[int], num_parts: int) -> int:
    """Find the smallest limit that a greedy cut can keep, by bisection over whole numbers."""
    low, high = max(max(costs), -(-ends[-1] // num_parts)), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(ends, middle) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_needed(ends: list[int], limit: int) -> int:
    parts, start = 0, 0
    while start < len(ends) - 1:
        start = bisect_right(ends, ends[start] + limit) - 1
        parts += 1
    return parts


def _most_even(ends: list[int], num_parts: int, limit: int) -> list[int]:
    """Return the cut with no part above the limit whose squares of costs and of lengths are least.

    ``best[i]`` is the least sum over the first i items in the parts so far; lengths only break
    ties, so that items that cost nothing do not all gather in one part.
    """
    count = len(ends) - 1
    places = np.array(ends, dtype=np.float64)
    parts = places[None, :] - places[:, None]  # parts[c, i]: cost of items c..i-1
    lengths = np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None]
    scale = max(float(limit), 1.0)
    badness = (parts / scale) ** 2 + 1e-9 * (lengths / count) ** 2
    badness[(lengths < 1) | (parts > limit)] = np.inf

    best = badness[0].copy()
    came_from: list[np.ndarray] = []
    for _ in range(num_parts - 1):
        total = best[:, None] + badness
        came_from.append(total.argmin(axis=0))
        best = total.min(axis=0)
    assert np.isfinite(best[count])  # the limit was found by a cut that keeps it

    sizes, stop = [], count
    for choices in reversed(came_from):
        start = int(choices[stop])
        sizes.append(stop - start)
        stop = start
    return [stop, *reversed(sizes)]
