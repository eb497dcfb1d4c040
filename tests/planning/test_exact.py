"""On small pipelines the search reaches what an exact solver proves to be the best."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType

import pytest

from stageline.errors import ScheduleError
from stageline.planning.searching import exact
from stageline.planning.searching.bounds import lower_bound
from stageline.planning.searching.finding import find_schedule
from stageline.planning.searching.improving import Effort, Search
from stageline.planning.searching.problem import Metric, Problem, Room
from stageline.planning.searching.rows import schedule_of
from stageline.planning.searching.seeds import ONE_BY_ONE, rhythms, rules
from stageline.scheduling import Costs, simulate
from tests.planning.problems import random_problem


def searched(problem: Problem, metric: Metric, passes: int = 400) -> Search:
    search = Search(problem, metric)
    effort = Effort(passes * problem.num_actions)
    search.try_seeds([ONE_BY_ONE, *rules(), *rhythms(30)], effort)
    search.shake(effort)
    return search


@pytest.mark.parametrize("seed", range(12))
def test_on_a_straight_pipeline_the_search_is_exact(seed: int) -> None:
    problem, _, metric = random_problem(seed, placement="straight")
    search = searched(problem, metric)
    assert search.best is not None
    solved = exact.solve(problem, metric, search.best, seconds=20)
    assert solved is not None
    assert solved.placed is None
    assert search.figures[0] == solved.bound


@pytest.mark.parametrize("seed", range(5))
def test_in_a_v_the_search_is_near(seed: int) -> None:
    problem, _, metric = random_problem(seed, placement="v")
    search = searched(problem, metric)
    assert search.best is not None
    solved = exact.solve(problem, metric, search.best, seconds=20)
    assert solved is not None
    assert search.bound[0] <= solved.bound <= search.figures[0] <= 1.06 * solved.bound


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_no_optimum_is_below_the_bound(seed: int) -> None:
    problem, _, metric = random_problem(seed)
    search = searched(problem, metric, passes=60)
    assert search.best is not None
    solved = exact.solve(problem, metric, search.best, seconds=60)
    assert solved is not None
    reached = search.best if solved.placed is None else solved.placed
    assert reached.figure(problem.offsets(metric)) >= lower_bound(problem, metric)


def test_the_solver_improves_on_a_bad_start() -> None:
    problem, costs, _ = random_problem(4, placement="v")
    search = Search(problem, "T")
    search.try_seeds([ONE_BY_ONE], Effort(0))
    assert search.best is not None
    solved = exact.solve(problem, "T", search.best, seconds=20)
    assert solved is not None
    assert solved.placed is not None
    simulation = simulate(schedule_of(solved.placed, "solved").check(), costs)
    assert solved.bound == simulation.T < search.figures[0]
    limits = zip(simulation.peak, problem.limits, strict=True)
    assert all(limit is None or peak <= limit for peak, limit in limits)


@pytest.mark.parametrize("freed", [3, 0, -2])
def test_the_solver_counts_bytes(freed: int) -> None:
    """I frees a part, nothing, or takes more: the solver and the search see the same room."""
    costs = Costs(forward=2, input_gradient=3, weight_gradient=2, latency=1)
    problem = Problem.of((0, 1, 2), 4, costs, Room((13,) * 3, (5,) * 3, (freed,) * 3))
    search = searched(problem, "span")
    assert search.best is not None
    solved = exact.solve(problem, "span", search.best, seconds=20)
    assert solved is not None
    assert solved.placed is None
    assert solved.bound == search.figures[0]


def test_find_schedule_says_what_the_solver_proved() -> None:
    costs = Costs(forward=[2, 7, 3, 5], input_gradient=[4, 1, 6, 2], weight_gradient=3, latency=2)
    plain = find_schedule(2, 4, costs, placement="v", memory_limit=1.5, effort=0.01)
    solved = find_schedule(2, 4, costs, placement="v", memory_limit=1.5, effort=0.01, solver=20)
    assert solved.is_optimal
    assert plain.bound <= solved.bound == solved.reached <= plain.reached


def test_a_large_problem_is_left_to_the_search() -> None:
    costs = Costs(latency=1)
    found = find_schedule(16, 64, costs, effort=0.001, solver=1000)
    assert found.source != "solver"


def test_without_the_solver_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> ModuleType:
        if name.startswith("ortools"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "ortools.sat.python", raising=False)
    costs = Costs(forward=[2, 7, 3, 5], input_gradient=[4, 1, 6, 2], weight_gradient=3, latency=2)
    with pytest.raises(ScheduleError, match=r"pip install 'stageline\[solver\]'"):
        find_schedule(2, 4, costs, placement="v", memory_limit=1.5, effort=0.01, solver=1)
