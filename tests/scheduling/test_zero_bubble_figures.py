"""The simulator against the published figures of the zero-bubble papers, to the unit.

"Measured" costs are the authors' own, in microseconds: forward, input gradient, weight gradient and
the latency of a hop. A rate is the share of the cost that exceeds a rank's work; 1F1B and H1 are
judged by T, H2 and the V schedule by the span, as the authors do.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from stageline.scheduling import Costs, Schedule, Simulation, simulate
from stageline.scheduling.schedules import one_f_one_b
from tests.scheduling.zero_bubble import zb_h1, zb_h2, zb_v

Figure = tuple[int, float]


def costs(f: int, b: int, w: int, c: int = 0) -> Costs:
    return Costs(forward=f, input_gradient=b, weight_gradient=w, latency=c)


def by_makespan(simulation: Simulation) -> tuple[object, float]:
    return simulation.T, round(float(simulation.bubble), 4)


def by_span(simulation: Simulation) -> tuple[object, float]:
    return simulation.span, round(float(simulation.span_bubble), 4)


@pytest.mark.parametrize(
    ("p", "m", "f", "b", "w", "c", "plain", "h1", "h2"),
    [
        (8, 24, 18522, 18086, 9337, 601, (1456749, 0.2431), (1310405, 0.1585), (1236632, 0.1083)),
        (8, 64, 29935, 29621, 19388, 535, (5671364, 0.1091), (5348572, 0.0554), (5205366, 0.0294)),
        (16, 64, 11307, 11254, 8101, 379, (2478390, 0.2082), (2202008, 0.1088), (2069123, 0.0516)),
        (32, 96, 10419, 10207, 7715, 408, (3699675, 0.2646), (3171569, 0.1421), (2907108, 0.0641)),
    ],
)
def test_measured_costs_of_the_first_paper(
    p: int, m: int, f: int, b: int, w: int, c: int, plain: Figure, h1: Figure, h2: Figure
) -> None:
    assert by_makespan(simulate(one_f_one_b(p, m), costs(f, b, w, c))) == plain
    assert by_makespan(simulate(zb_h1(p, m), costs(f, b, w, c))) == h1
    assert by_span(simulate(zb_h2(p, m), costs(f, b, w, c))) == h2


@pytest.mark.parametrize(
    ("sizes", "plain", "h1", "h2", "v"),
    [
        (
            (16, 48, 14407, 14380, 9676, 1610),
            *((5036318, 0.2668), (4362378, 0.1536), (4023798, 0.0823), (3975626, 0.0712)),
        ),
        (
            (24, 96, 6783, 6984, 5259, 758),
            *((4701012, 0.2229), (4114096, 0.1121), (3837314, 0.0480), (3835430, 0.0476)),
        ),
        (
            (32, 256, 9447, 9644, 7193, 887),
            *((15580188, 0.1362), (14305072, 0.0593), (13804112, 0.0251), (13772578, 0.0229)),
        ),
    ],
)
def test_measured_costs_of_the_second_paper(
    sizes: tuple[int, int, int, int, int, int], plain: Figure, h1: Figure, h2: Figure, v: Figure
) -> None:
    """Costs are per half stage, as the V schedule places two on a rank."""
    p, m, f, b, w, c = sizes
    whole = costs(2 * f, 2 * b, 2 * w, c)
    assert by_makespan(simulate(one_f_one_b(p, m), whole)) == plain
    assert by_makespan(simulate(zb_h1(p, m), whole)) == h1
    assert by_span(simulate(zb_h2(p, m), whole)) == h2
    assert by_span(simulate(zb_v(p, m), costs(f, b, w, c))) == v


@pytest.mark.parametrize(
    ("schedule", "T", "span", "peak"),
    [
        (zb_h1(4, 8), 27, 27, 4),
        (zb_h1(8, 16), 55, 55, 8),
        (zb_h2(4, 8), 27, 24, 7),
        (zb_h2(8, 16), 55, 48, 15),
        (zb_v(4, 8), Fraction(51, 2), 24, 4),
        (zb_v(8, 16), Fraction(103, 2), 48, 8),
    ],
    ids=str,
)
def test_unit_costs(schedule: Schedule, T: int, span: int, peak: int) -> None:
    one = Fraction(schedule.num_ranks, schedule.num_stages)
    simulation = simulate(schedule, Costs(one, input_gradient=one, weight_gradient=one))
    assert (simulation.T, simulation.span) == (T, span)
    assert simulation.peak_activations == (peak,) * schedule.num_ranks


def test_closed_forms_of_the_handmade_schedules() -> None:
    for f, b, w in itertools.product((1, 2, 3, 5), repeat=3):
        for p, m in ((2, 8), (4, 8), (4, 12)):
            ideal = m * (f + b + w)
            h1 = simulate(zb_h1(p, m), costs(f, b, w))
            assert ideal + (p - 1) * (f + b - min(f, b, w)) == h1.T
            assert h1.peak == (p,) * p
            h2 = simulate(zb_h2(p, m), costs(f, b, w))
            assert h2.span == ideal + (p - 1) * max(0, f + b - 2 * w, b - f)
            assert h2.peak == (2 * p - 1,) * p


def test_the_v_schedule_has_no_bubble_with_enough_microbatches() -> None:
    for p in (2, 4, 8):
        for m in (2 * p - 1, 2 * p, 3 * p):
            simulation = simulate(zb_v(p, m), costs(1, 1, 1))
            assert (simulation.span, simulation.T) == (6 * m, 6 * m + p - 1)
            assert simulation.span_bubble == 0
            assert simulation.peak == (2 * p,) * p
    assert simulate(zb_v(4, 4), costs(1, 1, 1)).span == 30
    assert simulate(zb_v(8, 8), costs(1, 1, 1)).span == 62
