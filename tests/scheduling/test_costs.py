"""What costs may be, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Kind, simulate
from stageline.scheduling.costs import Number, number_text
from stageline.scheduling.schedules import gpipe


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
        ({"latency": [1, 2]}, r"costs: latency is \[1, 2\]: give a finite number"),
        ({"forward": float("nan")}, "costs: forward is nan: give a finite number"),
        ({"recompute": float("inf")}, "costs: recompute is inf: give a finite number"),
        ({"forward": [1, "2"]}, "costs: forward of stage 1 is '2': give a finite number"),
        ({"forward": "12"}, "costs: forward is '12': give a finite number"),
        ({"forward": True}, "costs: forward is True: give a finite number"),
        ({"forward": object()}, "costs: forward is <object"),
    ],
)
def test_what_is_no_cost_is_refused(arguments: dict[str, Number], message: str) -> None:
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
