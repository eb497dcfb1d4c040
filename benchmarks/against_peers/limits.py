"""What a schedule makes of stage times that were measured with nothing to wait for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import stageline as sl
from benchmarks.tools.replaying import replay
from models import Case
from stageline.scheduling import Kind

Answer = dict[str, Any]
Series = Sequence[float]


def with_means(case: Case, answers: Sequence[Answer]) -> float:
    """Return the time of a step of 1F1B in which every microbatch takes the mean time."""
    costs = sl.Costs(
        forward=[statistics.fmean(answer["forwards"]) for answer in answers],
        backward=[statistics.fmean(answer["backwards"]) for answer in answers],
    )
    schedule = sl.schedules.one_f_one_b(2, case.num_microbatches)
    return float(sl.simulate(schedule, costs).T) + _update(answers)


def replayed(case: Case, answers: Sequence[Answer]) -> float:
    """Return the mean time of steps in which every microbatch takes the time that it took.

    The two ranks of a pipeline wait for each other in every microbatch, for the slower of the two:
    where times scatter, that is more than either takes on average.
    """
    count = case.num_microbatches
    steps = min(len(answer["updates"]) for answer in answers)
    spans = []
    for step in range(steps):
        part = slice(step * count, (step + 1) * count)
        spans.append(span([(a["forwards"][part], a["backwards"][part]) for a in answers]))
    return statistics.fmean(spans) + _update(answers)


def span(times: Sequence[tuple[Series, Series]]) -> float:
    """Return the time of one step of 1F1B; ``times``: forwards and backwards of each stage.

    Example:
        >>> span([([1.0, 1.0], [2.0, 2.0])] * 2)  # as the simulator says: 3 x (1 + 2)
        9.0
    """
    schedule = sl.schedules.one_f_one_b(len(times), len(times[0][0]))
    rows = [
        [(a, times[a.stage][a.kind is not Kind.FORWARD][a.microbatch]) for a in row]
        for row in schedule.compute_only().rows()
    ]
    return replay(rows, schedule.num_stages).seconds


def _update(answers: Sequence[Answer]) -> float:
    # The first rank ends last, and its next step begins after its optimizer.
    return statistics.fmean(answers[0]["updates"])
