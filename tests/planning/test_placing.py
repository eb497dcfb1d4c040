"""What is placed is a schedule that takes exactly as long as the simulator says, and fits."""

from __future__ import annotations

import random

import pytest

from stageline.planning.searching.lines import Lines
from stageline.planning.searching.placing import Placed, place
from stageline.planning.searching.problem import Problem, Room
from stageline.planning.searching.rows import follow, schedule_of, turned_round
from stageline.planning.searching.seeds import ONE_BY_ONE, Rhythm, rhythms
from stageline.scheduling import Costs, Kind, simulate
from tests.planning.problems import random_problem, room_for, vee

SEEDS = range(40)


def disturbed(problem: Problem, seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    rows = Rhythm((1.0,), (1.0,), (0.0, 0.0), 1.0)(problem)
    return [[int(start) + drawn.randint(0, 12) for start in row] for row in rows]


def assert_runs(placed: Placed, costs: Costs) -> None:
    """The simulator agrees on every end, and no rank holds more than it may."""
    problem = placed.lines.problem
    simulation = simulate(schedule_of(placed, "placed").check(), costs)
    assert max(placed.finish) == simulation.T
    ends = {}
    for rank in range(problem.num_ranks):
        for at in simulation.timeline(rank):
            ends[at.action.kind, at.action.stage, at.action.microbatch] = at.end
    for place_of, kind in enumerate(problem.kinds):
        for stage in range(problem.num_stages):
            row = placed.ends[place_of * problem.num_stages + stage]
            assert row == [ends[kind, stage, each] for each in range(len(row))]
    for peak, limit in zip(simulation.peak, problem.limits, strict=True):
        assert limit is None or peak <= limit


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("patience", [0, 4])
def test_forward_is_what_the_simulator_says(seed: int, patience: int) -> None:
    problem, costs, _ = random_problem(seed)
    placed = place(Lines.forward(problem), disturbed(problem, seed), patience=patience)
    if placed is not None:
        assert_runs(placed, costs)


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_in_time_is_a_schedule_too(seed: int) -> None:
    problem, costs, metric = random_problem(seed)
    forward = Lines.forward(problem)
    first = place(forward, ONE_BY_ONE(problem))
    assert first is not None
    offsets = problem.offsets(metric)
    backward = place(Lines.reversed(problem, offsets), first.turned())
    assert backward is not None
    again = turned_round(backward, forward)
    assert_runs(again, costs)
    # Read from its end it takes no longer than it did backward.
    assert again.figure(offsets) <= max(backward.finish) + min(offsets)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_by_one_fits_wherever_one_microbatch_does(seed: int) -> None:
    problem, _, _ = random_problem(seed, placement="v")
    tight = Problem.of(
        problem.placement,
        problem.num_microbatches,
        Costs(),
        room_for(2, problem.num_ranks, problem.num_stages),
    )
    assert place(Lines.forward(tight), ONE_BY_ONE(tight)) is not None


def test_starts_lead_to_the_same_schedule_again() -> None:
    problem, _, _ = random_problem(3)
    lines = Lines.forward(problem)
    placed = place(lines, ONE_BY_ONE(problem))
    assert placed is not None
    again = place(lines, placed.starts())
    assert again is not None
    assert again.orders == placed.orders
    assert follow(lines, placed.orders).ends == placed.ends


def test_a_v_does_not_fill_up_on_the_way_down() -> None:
    """Forwards first, and room for 4: the last place is left for the way up."""
    problem = Problem.of(vee(3), 6, Costs(), room_for(4, 3, 6))
    eager = [[each - (1000 if line < 3 else 0) for each in range(6)] for line in range(18)]
    # The order of priorities is kept where lines compete for room, so this one leads nowhere ..
    assert place(Lines.forward(problem), eager) is None
    # .. and one that lets the way up come in between does not.
    for rhythm in rhythms(5):
        assert place(Lines.forward(problem), rhythm(problem)) is not None


def test_bytes_that_the_input_gradient_frees_make_room() -> None:
    costs = Costs(forward=1, input_gradient=1, weight_gradient=1)
    roomy = Room((10, 10), (4, 4), (3, 3))
    rhythm = Rhythm((1.0,), (1.0,), (0.0, 0.0), 1.0)
    problem = Problem.of((0, 1), 6, costs, roomy)
    placed = place(Lines.forward(problem), rhythm(problem))
    assert placed is not None
    held = highest = 0
    for line in placed.orders[1]:
        held += int(placed.lines.changes[line])
        highest = max(highest, held)
    assert highest <= 10
    assert problem.kinds[1] is Kind.INPUT_GRADIENT
