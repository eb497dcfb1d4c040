"""Both forms of the inner loop, against each other and against the rule written down naively."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.scheduling import Action, Costs, Kind, Schedule, parse, schedules, simulate
from stageline.scheduling.costs import Number
from stageline.scheduling.kernels import WIDE, Problem, plain, waves
from stageline.scheduling.times import Times
from stageline.scheduling.units import Lookup
from stageline.scheduling.work import Work
from tests.scheduling.random_schedules import random_schedules

WHOLE = st.integers(0, 20)
RATIO = st.fractions(0, 20, max_denominator=12)
FLOAT = st.floats(0, 20)


@st.composite
def random_costs(draw: st.DrawFn, num_stages: int, numbers: st.SearchStrategy[Number]) -> Costs:
    def some(size: int) -> list[Number]:
        return draw(st.lists(numbers, min_size=size, max_size=size))

    forward, backward, inputs, weights, again = (some(num_stages) for _ in range(5))
    return Costs(forward, backward, inputs, weights, again, latency=some(num_stages - 1))


def naive(schedule: Schedule, costs: Costs) -> dict[Action, tuple[Number, Number]]:
    """Start and end of every action: whatever can run next is run, until nothing is left."""

    def hop(one: int, other: int) -> Number:
        return costs.hop(min(one, other), last, 0, 0)

    rank_of, last = schedule.placement, schedule.num_stages - 1
    rows = [list(row) for row in schedule.rows()]
    free: list[Number] = [0] * len(rows)
    times: dict[Action, tuple[Number, Number]] = {}
    while any(rows):
        for rank, row in enumerate(rows):
            while row:
                action = row[0]
                step = {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.INPUT_GRADIENT: 1}
                other = action.stage + step.get(action.kind, last + 1)
                start = free[rank]
                if 0 <= other <= last:
                    maker = Action(other, action.kind, action.microbatch)
                    if maker not in times:
                        break
                    far = rank_of[other] != rank
                    start = max(start, times[maker][1] + (hop(other, action.stage) if far else 0))
                duration = costs.per_stage(action.kind, last + 1)[action.stage]
                free[rank] = start + duration
                times[row.pop(0)] = (start, free[rank])
    return times


@settings(max_examples=150)
@given(st.data(), random_schedules(), st.sampled_from([WHOLE, RATIO]))
def test_exact_costs_give_the_naive_times(
    data: st.DataObject, schedule: Schedule, numbers: st.SearchStrategy[Number]
) -> None:
    costs = data.draw(random_costs(schedule.num_stages, numbers))
    simulation, wanted = simulate(schedule, costs), naive(schedule, costs)
    for rank, row in enumerate(schedule.rows()):
        assert simulation.start[rank] == tuple(wanted[action][0] for action in row)
        assert simulation.end[rank] == tuple(wanted[action][1] for action in row)


@settings(max_examples=150)
@given(st.data(), random_schedules(), st.sampled_from([WHOLE, RATIO, FLOAT]), st.integers(1, 50))
def test_waves_give_the_times_of_the_plain_form_to_the_last_bit(
    data: st.DataObject, schedule: Schedule, numbers: st.SearchStrategy[Number], watch: int
) -> None:
    # Random schedules are narrow: after so many waves, what is left goes to the plain form.
    problem = problem_of(schedule, data.draw(random_costs(schedule.num_stages, numbers)))
    one_by_one, at_once = plain(problem), waves(problem, watch=watch)
    assert one_by_one is not None
    assert at_once is not None
    assert one_by_one.dtype == at_once.dtype
    assert one_by_one.tolist() == at_once.tolist()


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "sequential", "forward-only"])
def test_wide_schedules_go_in_waves_and_are_the_same(name: str) -> None:
    costs = random.Random(0)
    schedule = schedules.build(name, 2 * WIDE, 40)
    forward = [costs.randint(1, 99) for _ in range(2 * WIDE)]
    problem = problem_of(schedule, Costs(forward, backward=7, latency=3))
    one_by_one = plain(problem)
    assert one_by_one is not None
    assert simulate(schedule, Costs(forward, backward=7, latency=3)).times.end.tolist() == (
        one_by_one.tolist()
    )


@pytest.mark.parametrize("num_ranks", [3, WIDE + 1])
def test_a_deadlock_is_explained_by_either_form(num_ranks: int) -> None:
    rows = [f"{stage}F0 {stage}F1 {stage}B0 {stage}B1" for stage in range(num_ranks)]
    rows[1] = "1F0 1B0 1F1 1B1"
    with pytest.raises(ScheduleError) as caught:
        simulate(parse("\n".join(rows)))
    assert str(caught.value).startswith(
        "deadlock: rank 1 waits at 1B0 for 2B0, rank 2 waits at 2F1"
    )


@pytest.mark.parametrize("watch", [1, 2, 256])
def test_a_deadlock_is_found_before_and_after_the_waves_have_ended(watch: int) -> None:
    work = Work.of(parse("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1"))
    nothing = Lookup(np.zeros(1, dtype=np.int64), np.zeros(len(work.waits), dtype=np.int64))
    stuck = Problem(work.bounds, work.ranks, work.waits, nothing, nothing)
    assert plain(stuck) is None
    assert waves(stuck, watch=watch) is None


def test_numbers_too_large_for_the_machine_stay_exact() -> None:
    huge = 10**30
    for num_ranks in (2, WIDE + 1):
        simulation = simulate(schedules.one_f_one_b(num_ranks, 3), Costs(huge, 2 * huge, latency=1))
        small = simulate(schedules.one_f_one_b(num_ranks, 3), Costs(3, 6, latency=0))
        assert isinstance(simulation.T, int)
        assert small.T * huge // 3 == simulation.T // huge * huge
        assert simulation.busy == (9 * huge,) * num_ranks


@pytest.mark.parametrize("cost", [2**40, Fraction(2**40, 3)])
def test_a_sum_that_would_overflow_does_not(cost: Number) -> None:
    schedule = schedules.gpipe(2, 2**12)
    large = simulate(schedule, Costs(cost * 2**11, cost * 2**11))
    assert (2**12 + 1) * 2 * cost * 2**11 == large.T
    assert large.times.end.dtype == object
    assert simulate(schedule, Costs(cost, cost)).times.end.dtype == np.int64


def test_one_float_makes_all_numbers_floats() -> None:
    simulation = simulate(schedules.one_f_one_b(2, 3), Costs(Fraction(1, 3), 2, latency=0.5))
    assert all(isinstance(end, float) for row in simulation.end for end in row)
    assert isinstance(simulation.bubble, float)


def problem_of(schedule: Schedule, costs: Costs) -> Problem:
    work = Work.of(schedule)
    times = Times.of(work, costs)
    return Problem(work.bounds, work.ranks, work.waits, times.lag, times.duration)
