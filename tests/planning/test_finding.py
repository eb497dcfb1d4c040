"""The schedule that is found is never worse than what ships, or than what was published."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import TypeAlias

import pytest

from stageline.errors import ScheduleError
from stageline.planning import find_schedule
from stageline.planning.searching import finding
from stageline.planning.searching.fusing import fused
from stageline.scheduling import Costs, Kind, Schedule, schedules, simulate
from tests.planning.published import STRAIGHT, UNEQUAL, VEE, Setting

UNIT = Costs(forward=1, input_gradient=1, weight_gradient=1)


def assert_ascending(schedule: Schedule) -> None:
    """Every stage takes the microbatches in turn: sums come out in the order of the plain model."""
    for row in schedule.arrays:
        for stage in set(row["stage"].tolist()):
            mine = row[row["stage"] == stage]
            for kinds in ([Kind.FORWARD], [Kind.BACKWARD, Kind.WEIGHT_GRADIENT]):
                taken = mine["microbatch"][[kind in kinds for kind in mine["kind"]]].tolist()
                assert taken == sorted(taken)


@pytest.mark.parametrize(("p", "limits"), [(4, range(4, 8)), (8, [8, 13])])
def test_the_bubble_shrinks_by_one_with_each_activation(p: int, limits: Sequence[int]) -> None:
    """Unit costs, m >= 2p, room for k = p .. 2p - 1 activations: span is 3m + 2p - 1 - k."""
    m = 2 * p
    for k in limits:
        found = find_schedule(p, m, UNIT, memory_limit=k, metric="span")
        assert found.simulation.span == 3 * m + 2 * p - 1 - k
        assert max(found.simulation.peak_activations) <= k
        assert found.is_optimal
        shortest = find_schedule(p, m, UNIT, memory_limit=k).reached
        assert shortest == 3 * m + p - 1


@pytest.mark.parametrize(("limit", "published"), [(10, 193), (14, 183)])
def test_a_published_figure_where_the_input_gradient_frees_half(limit: int, published: int) -> None:
    costs = Costs(
        forward=5,
        input_gradient=6,
        weight_gradient=4,
        activation_bytes=2,
        input_gradient_frees=1,
    )
    found = find_schedule(4, 12, costs, memory_limit_bytes=limit, metric="span")
    assert found.simulation.span <= published
    assert found.simulation.peak_bytes is not None
    assert max(found.simulation.peak_bytes) <= limit


@pytest.mark.parametrize("setting", list(STRAIGHT)[:2], ids=str)
def test_as_good_as_the_published_searches(setting: Setting) -> None:
    _assert_published(setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", list(STRAIGHT)[2:], ids=str)
def test_as_good_as_the_published_searches_on_the_other_settings(setting: Setting) -> None:
    _assert_published(setting)


def _assert_published(setting: Setting) -> None:
    p, m, costs = setting.p, setting.m, setting.costs
    for times, published in zip((1, 2), STRAIGHT[setting], strict=True):
        limit = times * p * setting.kept
        found = find_schedule(p, m, costs, memory_limit_bytes=limit, metric="span", effort=0.05)
        assert found.simulation.span <= published
        assert found.simulation.peak_bytes is not None
        assert max(found.simulation.peak_bytes) <= limit
    # Counted in whole activations, W holds as much as F; with room for p that costs nothing.
    found = find_schedule(p, m, costs, memory_limit=p, metric="span", effort=0.05)
    assert found.simulation.span <= STRAIGHT[setting][0]


@pytest.mark.slow
@pytest.mark.parametrize("setting", VEE, ids=str)
def test_better_than_both_in_a_v(setting: Setting) -> None:
    """Never above the published search nor the handcrafted order, with room for p activations."""
    p, m, costs = setting.p, setting.m, setting.costs
    found = find_schedule(p, m, costs, num_stages=2 * p, memory_limit=p, metric="span", effort=0.5)
    handcrafted = simulate(schedules.zb_v(2 * p, m), costs).span
    assert found.simulation.span <= VEE[setting]
    assert found.simulation.span < handcrafted
    assert max(found.simulation.peak_activations) <= p


@pytest.mark.parametrize("case", UNEQUAL, ids=str)
def test_unequal_stages_are_scheduled_as_well_as_they_can_be(
    case: tuple[int, int, list[int], list[int], list[int], int, int, int],
) -> None:
    p, m, f, b, w, c, limit, published = case
    costs = Costs(forward=f, input_gradient=b, weight_gradient=w, latency=c)
    found = find_schedule(p, m, costs, memory_limit=limit, metric="span", effort=0.2)
    assert found.simulation.span <= published
    assert found.gap < Fraction(3, 100)


FamilyCase: TypeAlias = tuple[int, int, int, int | None, Costs]

FAMILY_CASES: list[FamilyCase] = [
    (p, m, per_rank, limit, costs)
    for (p, m), per_rank, limit, costs in itertools.product(
        [(2, 1), (3, 5), (4, 9)],
        [1, 2, 3],
        [None, 1, 3],
        [
            UNIT,
            Costs(forward=2, backward=3, input_gradient=2, weight_gradient=2, latency=1),
            Costs(forward=0.7, backward=1.9, latency=0.3),
        ],
    )
]


@pytest.mark.parametrize("case", FAMILY_CASES[::5], ids=lambda case: f"{case[:4]}")
def test_never_worse_than_a_family_that_fits(case: FamilyCase) -> None:
    _assert_no_worse(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: f"{case[:4]}")
def test_never_worse_than_a_family_for_any_size(case: FamilyCase) -> None:
    _assert_no_worse(*case)


def _assert_no_worse(p: int, m: int, per_rank: int, limit: int | None, costs: Costs) -> None:
    for metric in ("T", "span"):
        found = find_schedule(
            p,
            m,
            costs,
            num_stages=p * per_rank,
            memory_limit=limit,
            metric="T" if metric == "T" else "span",
            effort=0.02,
        )
        schedule = found.schedule.check()
        assert schedule.name == "auto"
        assert_ascending(schedule)
        simulation = simulate(schedule, costs)
        assert simulation.T == found.simulation.T
        if limit is not None:
            assert max(simulation.peak_activations) <= limit
        for name in schedules.NAMES:
            try:
                other = schedules.build(name, p * per_rank, m, num_ranks=p)
            except ScheduleError:
                continue
            if other.replicas > 1 or not other.has_backward:
                continue
            theirs = simulate(other, costs)
            if limit is None or max(theirs.peak_activations) <= limit:
                assert getattr(simulation, metric) <= getattr(theirs, metric), name
        assert found.bound <= found.reached


def test_a_slow_stage_sets_the_pace_and_nothing_else_does() -> None:
    """One stage is three times as long: T is its own work, and the way there and back."""
    slow = [1, 1, 3, 1]
    costs = Costs(forward=slow, input_gradient=slow, weight_gradient=slow)
    found = find_schedule(4, 12, costs, memory_limit=4)
    assert found.is_optimal
    assert found.simulation.T == 2 + 12 * 9 + 0  # two forwards before it; its W come last
    assert found.simulation.busy[2] == 12 * 9


def test_a_limit_for_each_rank() -> None:
    found = find_schedule(3, 8, UNIT, memory_limit=[3, 2, 1], metric="span")
    assert found.simulation.peak == (3, 2, 1)


def test_the_whole_backward_is_used_where_it_is_shorter() -> None:
    costs = Costs(forward=2, backward=3, input_gradient=3, weight_gradient=3)
    found = find_schedule(3, 6, costs, memory_limit=3)
    assert Kind.BACKWARD in found.schedule.kinds()
    assert found.simulation.T <= simulate(schedules.one_f_one_b(3, 6), costs).T


def test_nothing_waits_longer_for_fused_backwards() -> None:
    costs = Costs(forward=2, input_gradient=3, weight_gradient=1, latency=1)
    for schedule in (schedules.zb_h1(4, 8), schedules.zb_v(8, 9), schedules.zb_h2(3, 7)):
        before, after = simulate(schedule, costs), simulate(fused(schedule, costs).check(), costs)
        assert (after.T, after.span, after.peak) == (before.T, before.span, before.peak)
        assert len(after.schedule) < len(before.schedule)


def test_the_placement_can_be_chosen() -> None:
    for placement, ranks in (
        ("straight", (0, 0, 1, 1)),
        ("looped", (0, 1, 0, 1)),
        ("v", (0, 1, 1, 0)),
        ((1, 0, 0, 1), (1, 0, 0, 1)),
    ):
        found = find_schedule(2, 4, UNIT, num_stages=4, placement=placement, effort=0.02)
        assert found.schedule.placement == ranks


def test_the_same_in_another_process() -> None:
    """Ranks search on their own and must agree."""
    code = (
        "from stageline.planning import find_schedule; from stageline.scheduling import Costs;"
        "costs = Costs(forward=[3, 5, 2, 4] * 2, latency=1);"
        "found = find_schedule(4, 9, costs, memory_limit=3, effort=0.1);"
        "print(found.schedule.text())"
    )
    costs = Costs(forward=[3, 5, 2, 4] * 2, latency=1)
    mine = find_schedule(4, 9, costs, memory_limit=3, effort=0.1).schedule.text()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == mine.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit": 0.5}, "rank 0 may hold 0.5 activations, one microbatch takes 1"),
        ({"memory_limit": [1, 2]}, "given for 2 ranks, the pipeline has 3"),
        ({"memory_limit": -1}, "memory_limit of rank 0 is -1"),
        ({"memory_limit_bytes": 5}, "activation_bytes"),
        ({"memory_limit": 1, "memory_limit_bytes": 5}, "give one of them"),
        ({"metric": "time"}, "choose one of T, span"),
        ({"placement": "v"}, "cannot be placed 'v': choose one of straight"),
        ({"placement": "w"}, "unknown placement 'w'"),
        ({"placement": [0, 0, 1]}, "every one of 3 ranks a stage"),
        ({"num_stages": 2}, "needs a stage for every rank"),
        ({"effort": -1}, "give 0 or more"),
    ],
)
def test_what_cannot_be_is_said(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        find_schedule(3, 4, UNIT, **arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_found_prints_where_it_stands() -> None:
    found = find_schedule(4, 8, UNIT, memory_limit=5, metric="span")
    lines = str(found).splitlines()
    assert lines[0] == "from search: span 26, lower bound 26, none is shorter"
    assert lines[1].split() == ["T", "span", "peak", "fits"]
    assert ["zb-h1", "27", "27", "4", "yes"] in [line.split() for line in lines]
    assert ["zb-h2", "27", "24", "7", "no"] in [line.split() for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("per_rank", [1, 2])
def test_thirty_two_ranks(per_rank: int) -> None:
    costs = Costs(forward=9447, input_gradient=9644, weight_gradient=7193, latency=887)
    found = find_schedule(32, 256, costs, num_stages=32 * per_rank, memory_limit=40)
    assert found.gap < Fraction(1, 100)
    found.schedule.check()


def families(num_stages: int, count: int, num_ranks: int) -> Iterator[Schedule]:
    """Yield every family that can be run and does not trade time for memory."""
    for name in schedules.NAMES:
        if schedules.family(name).refusal is None and name not in (*finding.SLOW, "forward-only"):
            with suppress(ScheduleError):
                yield schedules.build(name, num_stages, count, num_ranks=num_ranks)


def test_of_very_many_actions_the_best_family_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 512 ranks even one order takes minutes, so a search went on for longer than anybody
    waits. The families that are built step by step come last, but they come."""
    monkeypatch.setattr(finding, "MOST_SEARCHED", 100)
    costs = Costs(forward=3, input_gradient=3, weight_gradient=2, latency=1)
    found = find_schedule(4, 12, costs, num_stages=8)
    reached = {each.name: each.T for each in found.candidates}
    assert found.source in reached
    assert found.reached == min(reached.values()) == found.simulation.T
    assert not {"search", "v-half", "varuna"} & set(reached)
    assert found.bound <= found.reached
    found.schedule.check()
    # Families are left out by a bound; none of those would have been better.
    assert found.reached == min(simulate(each, costs).T for each in families(8, 12, 4))

    tight = find_schedule(4, 12, costs, num_stages=8, memory_limit=2)
    assert tight.source in ("v-min", "v-half", "sequential", "varuna")
    assert max(tight.simulation.peak_activations) <= 2


@pytest.mark.parametrize("num_stages", [4, 8])
def test_a_first_stage_that_does_nothing_in_i_is_searched_for_too(num_stages: int) -> None:
    """As costs of models have it: nobody waits for the gradient of data, so W is B there."""
    halves = {"input_gradient": [0] + [3] * (num_stages - 1), "weight_gradient": [4] + [2] * 7}
    costs = Costs(
        forward=2,
        backward=[4] * num_stages,
        input_gradient=halves["input_gradient"],
        weight_gradient=halves["weight_gradient"][:num_stages],
    )
    found = find_schedule(4, 8, costs, num_stages=num_stages, effort=0.1)
    shipped = []
    for name in schedules.NAMES:
        family = schedules.family(name)
        if family.refusal is None and name != "forward-only":
            try:
                built = schedules.build(name, num_stages, 8, num_ranks=4)
            except ScheduleError:
                continue  # it takes another number of stages
            shipped.append(simulate(built, costs).T)
    assert len(shipped) > 1
    assert min(shipped) >= found.simulation.T
