"""What costs may be, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Kind, simulate
from stageline.scheduling.costs import Number, number_text
from stageline.scheduling.schedules import forward_only, gpipe


def test_defaults() -> None:
    costs = Costs()
    by_kind = {kind: costs.per_stage(kind, 1)[0] for kind in Kind if not kind.is_transfer}
    assert by_kind == {
        Kind.FORWARD: 1,
        Kind.BACKWARD: 2,
        Kind.INPUT_GRADIENT: 1,
        Kind.WEIGHT_GRADIENT: 1,
        Kind.RECOMPUTE: 1,
        Kind.REDUCE: 0,
    }
    assert costs.latency == 0


def test_halves_of_the_backward_are_exact() -> None:
    assert Costs(backward=[4, 3]).per_stage(Kind.WEIGHT_GRADIENT, 2) == (2, Fraction(3, 2))
    assert Costs(backward=0.5).per_stage(Kind.INPUT_GRADIENT, 1) == (0.25,)


def test_a_backward_is_as_long_as_its_halves() -> None:
    halves = Costs(input_gradient=[3, Fraction(1, 2)], weight_gradient=4)
    assert halves.per_stage(Kind.BACKWARD, 2) == (7, Fraction(9, 2))
    assert Costs(backward=1, input_gradient=3).per_stage(Kind.BACKWARD, 1) == (1,)


def test_a_hop_may_differ_from_cut_to_cut() -> None:
    # F: 0 .. 1, over a cut of 10 to 11 .. 12, over one of 20 to 32 .. 33.
    simulation = simulate(forward_only(3, 1), Costs(latency=[10, 20]))
    assert simulation.end == ((1,), (12,), (33,))
    assert simulate(gpipe(3, 1), Costs(1, 1, latency=[10, 20])).T == 6 + 2 * (10 + 20)


def test_a_hop_may_differ_by_direction() -> None:
    assert simulate(gpipe(2, 1), Costs(1, 1, latency={(0, 1): 5, (1, 0): 7})).T == 4 + 5 + 7


def test_bandwidth_adds_to_the_latency_and_stays_exact() -> None:
    costs = Costs(1, latency=2, bandwidth=3, edge_bytes=[7, 6])
    assert [costs.hop(cut, 2, 0, 1) for cut in range(2)] == [2 + Fraction(7, 3), 4]
    assert 3 + 2 + Fraction(7, 3) + 4 == simulate(forward_only(3, 1), costs).T
    assert simulate(forward_only(3, 1), Costs(1, bandwidth=0.5, edge_bytes=1)).T == 3 + 2 * 2.0


def test_values_on_the_way_do_not_hold_up_each_other() -> None:
    # Each takes 100 to arrive, but they leave one after the other and so they arrive.
    assert simulate(forward_only(2, 5), Costs(1, bandwidth=1, edge_bytes=100)).T == 5 + 1 + 100


def test_stages_of_one_rank_hand_over_in_no_time() -> None:
    costs = Costs(1, latency={}, bandwidth=[1], edge_bytes=10)
    assert simulate(forward_only(2, 2, num_ranks=1), costs).T == 4


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            Costs(latency=[1]),
            "latency is given for 1 cuts, the schedule has 2: give one number per",
        ),
        (Costs(latency={(0, 1): 3}), "latency is not given from rank 1 to rank 2: add it"),
        (Costs(bandwidth=0, edge_bytes=1), "bandwidth is 0: give more"),
        (Costs(bandwidth=1, edge_bytes=[1]), "edge_bytes is given for 1 cuts"),
    ],
)
def test_hops_that_make_no_sense_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^costs: {message}"):
        simulate(forward_only(3, 1), costs)


def test_costs_can_be_compared_and_hashed() -> None:
    one, same = (Costs(1, latency={(0, 1): 5}) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)


def test_numpy_numbers_become_plain_ones() -> None:
    costs = Costs(forward=np.int64(3), backward=np.array([1.5, 2.0]).tolist())  # type: ignore[arg-type]  # as users do
    assert type(costs.forward) is int
    per_stage = Costs(forward=np.array([1, 2])).per_stage(Kind.FORWARD, 2)  # type: ignore[arg-type]  # as users do
    assert [type(cost) for cost in per_stage] == [int, int]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": -1}, "costs: forward is -1: give zero or more"),
        ({"backward": [1, -2]}, "costs: backward of stage 1 is -2: give zero or more"),
        ({"latency": -0.5}, "costs: latency is -0.5: give zero or more"),
        ({"latency": [1, -2]}, "costs: latency of cut 1 is -2: give zero or more"),
        ({"latency": {(0, 1): -2}}, r"costs: latency of \(0, 1\) is -2: give zero or more"),
        ({"latency": {3: 2}}, r"costs: latency of 3: name a pair of ranks, such as \(0, 1\)"),
        ({"forward": {(0, 1): 2}}, r"costs: forward is {\(0, 1\): 2}: give a finite number"),
        ({"input_gradient": 3}, "of the two halves of the backward one is given"),
        ({"weight_gradient": 3}, "give input_gradient and weight_gradient, or backward"),
        ({"forward": float("nan")}, "costs: forward is nan: give a finite number"),
        ({"recompute": float("inf")}, "costs: recompute is inf: give a finite number"),
        ({"forward": [1, "2"]}, "costs: forward of stage 1 is '2': give a finite number"),
        ({"forward": "12"}, "costs: forward is '12': give a finite number"),
        ({"forward": True}, "costs: forward is True: give a finite number"),
        ({"forward": object()}, "costs: forward is <object"),
    ],
)
def test_what_is_no_cost_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Costs(**arguments)


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="backward is given for 3 stages, the schedule has 2"):
        simulate(gpipe(2, 2), Costs(backward=[1, 2, 3]))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (3, "3"),
        (Fraction(6, 2), "3"),
        (Fraction(1, 8), "0.125"),
        (Fraction(2, 3), "2/3"),
        (0.1 + 0.2, "0.3"),
        (5671364.0, "5671364"),
    ],
)
def test_numbers_for_people(number: Number, text: str) -> None:
    assert number_text(number) == text
