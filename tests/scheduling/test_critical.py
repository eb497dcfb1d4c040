"""Where the time of a step goes: critical path, time line, and what each rank waits for."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.scheduling import Costs, Schedule, parse, schedules, simulate
from stageline.scheduling.schedules import forward_only, gpipe, one_f_one_b
from tests.scheduling.families import example
from tests.scheduling.random_schedules import random_schedules


def test_the_slow_stage_is_the_path() -> None:
    path = simulate(gpipe(3, 2), Costs([1, 9, 1], [2, 9, 2], latency=1)).critical_path
    assert [str(step.action) for step in path] == [
        "0F0",
        "1F0",
        "1F1",
        "2F1",
        "2B0",
        "1B0",
        "1B1",
        "0B1",
    ]
    assert [step.why for step in path] == ["start", *["edge", "rank"] * 3, "edge"]
    assert [step.edge for step in path if step.edge] == ["0->1 F0", "1->2 F1", "2->1 B0", "1->0 B1"]


def test_nothing_to_do_has_no_path() -> None:
    assert simulate(parse("rank 0:")).critical_path == ()
    assert len(simulate(gpipe(2, 2), Costs(0, 0)).critical_path) == 1


@given(random_schedules(), st.lists(st.integers(0, 9), min_size=5, max_size=5), st.integers(0, 9))
def test_the_path_adds_up_to_the_makespan(
    schedule: Schedule, durations: list[int], latency: int
) -> None:
    forward, backward, inputs, weights, again = durations
    costs = Costs(forward, backward, inputs, weights, again, latency)
    simulation = simulate(schedule, costs)
    path = simulation.critical_path
    assert path[0].start == 0
    assert path[-1].end == simulation.T
    for before, after in pairwise(path):
        assert after.start == before.end + after.hop
        assert after.hop == (latency if before.rank != after.rank else 0)
        assert (after.why == "rank") == (before.rank == after.rank)
    assert sum(step.end - step.start + step.hop for step in path) == simulation.T


@pytest.mark.parametrize("pair", [None, 7])
@pytest.mark.parametrize("name", schedules.NAMES)
def test_the_path_of_every_family_adds_up(name: str, pair: int | None) -> None:
    """A pair that waited for its backward's input was put down to its forward's: 9 units short."""
    costs = Costs(3, input_gradient=4, weight_gradient=2, latency=5, pair=pair)
    simulation = simulate(example(name, num_ranks=4, num_microbatches=8), costs)
    path = simulation.critical_path
    assert path[0].start == 0
    assert all(after.start == before.end + after.hop for before, after in pairwise(path))
    assert sum(step.end - step.start + step.hop for step in path) == simulation.T


@given(random_schedules(), st.integers(0, 9))
def test_the_time_of_a_rank_is_busy_or_idle(schedule: Schedule, latency: int) -> None:
    simulation = simulate(schedule, Costs(2, 3, latency=latency))
    for rank, row in enumerate(schedule.rows()):
        line = simulation.timeline(rank)
        assert tuple(at.action for at in line) == row
        gaps = [after.start - before.end for before, after in pairwise(line)]
        assert simulation.wait[rank] == sum(gaps)
        assert simulation.busy[rank] + simulation.idle[rank] == simulation.T
        ends = line[0].start + simulation.T - line[-1].end
        assert simulation.idle[rank] == simulation.wait[rank] + ends


def test_waits_and_idle_time_of_1f1b() -> None:
    simulation = simulate(one_f_one_b(4, 8))
    assert simulation.busy == (24,) * 4
    assert simulation.idle == (9,) * 4
    assert simulation.wait == (9, 6, 3, 0)


def test_being_late_is_not_a_bubble_of_the_span() -> None:
    simulation = simulate(forward_only(4, 2), Costs(forward=3))
    assert simulation.bubble == 1 - Fraction(2 * 3, 15)
    assert simulation.span_bubble == 0


def test_the_span_is_compared_with_the_busiest_rank() -> None:
    simulation = simulate(forward_only(2, 4), Costs(forward=[1, 3]))
    assert (simulation.T, simulation.span, simulation.busy) == (13, 12, (4, 12))
    assert simulation.span_bubble == 0
