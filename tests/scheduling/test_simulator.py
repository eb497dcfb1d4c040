"""The simulator against closed forms and published figures, to the unit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Schedule, order_transfers, parse, schedules, simulate
from stageline.scheduling.schedules import forward_only, gpipe, one_f_one_b, sequential

SIZES = list(itertools.product(range(2, 9), range(1, 26)))
COSTS = [
    (1, 1, 0),
    (1, 2, 0),
    (1, 2, 1),
    (3, 5, 2),
    (1, 2, 10),
    (Fraction(1, 3), 2, Fraction(7, 2)),
]


@pytest.mark.parametrize(("f", "b", "c"), COSTS)
def test_gpipe_closed_form(f: int, b: int, c: int) -> None:
    for p, m in SIZES:
        simulation = simulate(gpipe(p, m), Costs(f, b, latency=c))
        makespan = simulation.T
        assert makespan == (m + p - 1) * (f + b) + 2 * (p - 1) * c
        assert simulation.peak == (m,) * p


@pytest.mark.parametrize(("f", "b", "c"), COSTS)
def test_one_f_one_b_closed_form(f: int, b: int, c: int) -> None:
    for p, m in SIZES:
        simulation = simulate(one_f_one_b(p, m), Costs(f, b, latency=c))
        hops = (p - 1) + (m - 1) - math.ceil((m - 1) / p)
        makespan = simulation.T
        assert makespan == (m + p - 1) * (f + b) + 2 * c * hops
        assert simulation.peak == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize(("f", "b", "c"), COSTS)
def test_sequential_closed_form(f: int, b: int, c: int) -> None:
    for p, m in SIZES:
        simulation = simulate(sequential(p, m), Costs(f, b, latency=c))
        makespan = simulation.T
        assert makespan == m * (p * (f + b) + 2 * (p - 1) * c)
        assert simulation.peak == (1,) * p


@pytest.mark.parametrize(("f", "b", "c"), COSTS)
def test_forward_only_closed_form(f: int, b: int, c: int) -> None:
    for p, m in SIZES:
        simulation = simulate(forward_only(p, m), Costs(f, b, latency=c))
        makespan = simulation.T
        assert makespan == (m + p - 1) * f + (p - 1) * c
        assert simulation.span == m * f
        assert simulation.peak == (1,) * p


def test_one_rank_never_waits() -> None:
    for name in schedules.NAMES:
        family = schedules.family(name)
        if family.replicas > 1:
            continue  # they begin at both ends
        schedule = schedules.build(name, family.num_stages(1), 4, num_ranks=1)
        simulation = simulate(schedule, Costs(latency=9))
        assert simulation.busy == (simulation.T,)
        assert simulation.bubble == 0


@pytest.mark.parametrize(
    ("family", "p", "m", "figures"),
    [
        (gpipe, 4, 8, (33, 33, 8)),
        (gpipe, 8, 16, (69, 69, 16)),
        (one_f_one_b, 4, 8, (33, 33, 4)),
        (one_f_one_b, 8, 16, (69, 69, 8)),
    ],
)
def test_time_span_and_peak_of_common_sizes(
    family: Callable[[int, int], Schedule], p: int, m: int, figures: tuple[int, int, int]
) -> None:
    simulation = simulate(family(p, m), Costs(forward=1, backward=2))
    assert (simulation.T, simulation.span, max(simulation.peak)) == figures


@pytest.mark.parametrize(
    ("p", "m", "f", "b", "w", "c", "cost"),
    [
        (8, 24, 18522, 18086, 9337, 601, 1456749),
        (8, 64, 29935, 29621, 19388, 535, 5671364),
        (16, 64, 11307, 11254, 8101, 379, 2478390),
        (32, 96, 10419, 10207, 7715, 408, 3699675),
    ],
)
def test_one_f_one_b_figures_of_the_zero_bubble_paper(
    p: int, m: int, f: int, b: int, w: int, c: int, cost: int
) -> None:
    """Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), measured costs in microseconds."""
    makespan = simulate(one_f_one_b(p, m), Costs(f, b + w, latency=c)).T
    assert makespan == cost


def test_start_and_end_of_every_action() -> None:
    simulation = simulate(one_f_one_b(2, 2), Costs(forward=2, backward=3, latency=1))
    #                            0F0 0F1 0B0 0B1
    assert simulation.start == ((0, 2, 9, 14), (3, 5, 8, 10))
    assert simulation.end == ((2, 4, 12, 17), (5, 8, 10, 13))


def test_span_is_not_makespan() -> None:
    simulation = simulate(forward_only(4, 2), Costs(forward=3))
    assert (simulation.T, simulation.span) == (15, 6)


def test_costs_may_differ_from_stage_to_stage() -> None:
    costs = Costs(forward=[1, 5], backward=(2, 7))
    simulation = simulate(gpipe(2, 2), costs)
    assert simulation.busy == (6, 24)
    # 0F0, the busy stage 1, and then only 0B1 is left: 1B0 is followed by 1B1, which covers 0B0.
    assert simulation.T == 1 + 24 + 2


def test_every_kind_of_compute_has_a_cost() -> None:
    schedule = parse("0F0 0R0 0I0 0W0 0REDUCE")
    assert simulate(schedule, Costs(3, 4)).end == ((3, 6, 8, 10, 10),)
    costs = Costs(3, 4, input_gradient=10, weight_gradient=20, recompute=30)
    assert simulate(schedule, costs).end == ((3, 33, 43, 63, 63),)


def test_the_weight_gradient_releases_the_activation() -> None:
    split = parse("0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2")
    assert simulate(split).peak == (2,)
    assert simulate(split, Costs(latency=1)).T == 9


def test_a_split_backward_frees_the_rank_before_early() -> None:
    fused = simulate(parse("0F0 0B0 \n 1F0 1B0"), Costs(1, 2))
    split = simulate(parse("0F0 0I0 0W0 \n 1F0 1I0 1W0"), Costs(1, 2))
    assert (fused.T, split.T) == (6, 5)


def test_exact_numbers_stay_exact() -> None:
    whole = simulate(one_f_one_b(3, 4), Costs(forward=1, backward=2))
    assert isinstance(whole.T, int)
    assert whole.bubble == Fraction(1, 3)
    thirds = simulate(one_f_one_b(3, 4), Costs(Fraction(1, 3), Fraction(2, 3)))
    assert thirds.T == 6
    assert isinstance(thirds.T, Fraction)
    floats = simulate(one_f_one_b(3, 4), Costs(0.5, 1.0))
    assert floats.T == 9.0
    assert isinstance(floats.T, float)
    assert floats.bubble == pytest.approx(1 / 3)
    assert simulate(one_f_one_b(2, 1), Costs(10**30, 0)).T == 2 * 10**30


def test_bubble_is_the_idle_share_of_all_ranks() -> None:
    # 4 ranks for 33 units of time each, of which each computes 24.
    assert simulate(gpipe(4, 8)).bubble == Fraction(9, 33)
    assert simulate(gpipe(4, 8), Costs(0, 0)).bubble == 0


def test_transfers_in_the_rows_change_nothing() -> None:
    for p, m in [(2, 3), (4, 8)]:
        plain = one_f_one_b(p, m)
        costs = Costs(2, 3, latency=1)
        with_transfers = simulate(order_transfers(plain), costs)
        assert with_transfers.end == simulate(plain, costs).end
        assert with_transfers.peak == simulate(plain, costs).peak


def test_costs_do_not_change_who_computes_what() -> None:
    simulation = simulate(gpipe(2, 3), Costs(0, 0))
    assert simulation.T == 0
    assert simulation.end == ((0,) * 6, (0,) * 6)


def test_a_deadlock_is_explained() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(parse("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1"))
    assert str(caught.value) == (
        "deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1"
    )


def test_a_deadlock_names_the_circle_and_not_who_waits_for_it() -> None:
    text = "0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1 \n 2F0 2F1 2B0 2B1"
    with pytest.raises(ScheduleError) as caught:
        simulate(parse(text))
    assert str(caught.value) == (
        "deadlock: rank 1 waits at 1B0 for 2B0, rank 2 waits at 2F1 for 1F1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0 \n 1F0", "rank 0 waits at 0B0 for 1B0, which no rank runs"),
        ("0B0 \n 1F0 1B0", "rank 0 waits at 0B0 for 0F0, which no rank runs"),
        ("0F1 0F0 \n 1F1 1F2", "rank 1 waits at 1F2 for 0F2, which no rank runs"),
        ("0F0 0W0", "rank 0 waits at 0W0 for 0I0, which no rank runs"),
        ("0R0", "rank 0 waits at 0R0 for 0F0, which no rank runs"),
        ("0B0 0F0", "rank 0 waits at 0B0 for 0F0"),
        ("0F0 0W0 0I0", "rank 0 waits at 0W0 for 0I0"),
        ("1F0 0F0", "rank 0 waits at 1F0 for 0F0"),
    ],
)
def test_what_never_comes_is_a_deadlock(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^deadlock: {message}$"):
        simulate(parse(text))


def test_of_an_action_that_stands_twice_the_first_counts() -> None:
    assert simulate(parse("0F0 0F1 0F0 \n 1F0 1F1")).start[1] == (1, 2)


def test_a_slip_of_the_pen_does_not_allocate_gigabytes() -> None:
    with pytest.raises(ScheduleError, match=r"call check\(\) for what is missing"):
        simulate(parse("0F0 0F999999999 \n 999999F0"))


def test_rows_without_work_take_no_time() -> None:
    simulation = simulate(parse("rank 0:\nrank 1:"))
    assert (simulation.T, simulation.span, simulation.bubble) == (0, 0, 0)
    assert simulation.peak == (0, 0)


def test_readable_summary() -> None:
    simulation = simulate(one_f_one_b(4, 8), Costs(Fraction(1, 2), 1))
    assert str(simulation) == (
        "1f1b: 4 stages on 4 ranks, 8 microbatches\n"
        "T 16.5   span 16.5   bubble 27.3%   peak 4 3 2 1"
    )
