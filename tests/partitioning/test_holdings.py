"""Peaks from counts are those of the simulation, to the byte."""

from __future__ import annotations

import random

import pytest

from stageline.partitioning.holdings import Holdings
from stageline.planning.candidates import AUTO, Candidate, methods, runnable
from stageline.scheduling import Costs
from stageline.scheduling.memory import peak_bytes

METHODS = methods([name for name in runnable() if name != AUTO], recompute=True)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_peaks_are_those_of_the_simulation(method: object) -> None:
    draw = random.Random(0)
    for ranks, count in ((2, 4), (3, 7), (4, 9)):
        candidate = Candidate(method, 1, ranks, count, 1)  # type: ignore[arg-type]
        if candidate.refusal:
            continue
        schedule = candidate.method.build(ranks, count)
        stages = range(candidate.num_stages)
        kept = [draw.randint(5, 90) for _ in stages]
        inputs = [draw.randint(0, size) for size in kept]
        freed = [draw.randint(-20, size) for size in kept]
        costs = Costs(activation_bytes=kept, input_bytes=inputs, input_gradient_frees=freed)
        holdings = Holdings.of(schedule)
        found = [
            holdings.peak(rank, [(kept[at], inputs[at], freed[at]) for at in holdings.stages[rank]])
            for rank in range(ranks)
        ]
        assert tuple(found) == peak_bytes(schedule, costs)
