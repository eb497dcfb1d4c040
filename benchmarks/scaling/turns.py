"""Contestants of a part take turns: in every round each runs some steps, in random order."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks.tools.ranks import Ranks

Size = TypeVar("Size")

steps: dict[str, Callable[[], object]] = {}  # by contestant, in each process


def turn(rank: int, name: str, count: int) -> float:
    """Return the seconds of a step; 0 on a rank that has none."""
    step = steps.get(name)
    if step is None:
        return 0.0
    step()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def race(
    prepare: Callable[[int, str, Size], None],
    names: Sequence[str],
    sizes: Sequence[Size],
    *,
    rounds: int,
    seconds: float,
) -> dict[Size, dict[str, float]]:
    """Return the median seconds of a step by size and contestant.

    Args:
        prepare: Puts the step of a contestant and a size into ``steps``, on a rank.
        names: The contestants.
        sizes: What grows.
        rounds: How often each has its turn.
        seconds: How long a turn is; at least one step.
    """
    found: dict[Size, dict[str, float]] = {}
    shuffle = random.Random(0)
    with Ranks(2) as ranks:
        for size in sizes:
            many = {}
            for name in names:
                ranks.run(prepare, name, size)
                many[name] = max(1, round(seconds / ranks.run(turn, name, 1)[0]))
            times: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(rounds):
                for name in shuffle.sample(list(names), len(names)):
                    times[name].append(ranks.run(turn, name, many[name])[0])
            found[size] = {name: statistics.median(each) for name, each in times.items()}
    return found
