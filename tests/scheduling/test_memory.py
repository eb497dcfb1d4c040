"""What ranks hold: activations counted, and in bytes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Schedule, parse, simulate
from stageline.scheduling.memory import peak_bytes
from stageline.scheduling.schedules import forward_only, gpipe, one_f_one_b
from tests.scheduling.random_schedules import random_schedules
from tests.scheduling.zero_bubble import zb_h1, zb_v


def test_bytes_are_unknown_unless_given() -> None:
    assert simulate(gpipe(2, 2)).peak_bytes is None


def test_bytes_of_each_stage() -> None:
    costs = Costs(activation_bytes=[100, 10, 1])
    assert simulate(one_f_one_b(3, 8), costs).peak_bytes == (300, 20, 1)
    assert simulate(one_f_one_b(3, 8, num_ranks=2), costs).peak_bytes == (220, 1)


def test_without_a_backward_one_microbatch_at_a_time_is_held() -> None:
    costs = Costs(activation_bytes=[100, 10, 1])
    assert simulate(forward_only(3, 8, num_ranks=2), costs).peak_bytes == (100, 1)
    assert simulate(forward_only(3, 8, num_ranks=2), costs).peak == (1, 1)


def test_the_input_gradient_releases_its_part() -> None:
    schedule = parse("0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2")
    for freed, peak in ((0, 300), (40, 220), (100, 100)):
        costs = Costs(activation_bytes=100, input_gradient_frees=freed)
        assert simulate(schedule, costs).peak_bytes == (peak,)
        assert simulate(schedule, costs).peak == (3,)


def test_sizes_of_the_zero_bubble_paper() -> None:
    """A layer keeps 34h + 5as per token, of which W needs 32h; here h = 4, as = 8."""
    costs = Costs(activation_bytes=176, input_gradient_frees=48)
    # The last rank runs F I, and its W lag behind by three: of those it keeps 128 each.
    assert simulate(zb_h1(4, 8), costs).peak_bytes == (704, 656, 608, 560)
    assert simulate(zb_h1(4, 8), Costs(activation_bytes=176)).peak_bytes == (704,) * 4


def test_two_stages_of_a_rank_count_half_each() -> None:
    assert simulate(zb_v(4, 8)).peak == (8,) * 4
    assert simulate(zb_v(4, 8)).peak_activations == (4,) * 4
    uneven = simulate(gpipe(3, 1, num_ranks=2))
    assert uneven.peak_activations == (Fraction(4, 3), Fraction(2, 3))


class TestRecompute:
    """Where R follows, F keeps the input alone, and R brings back what F did not keep."""

    schedule = parse("0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2")

    def test_counts(self) -> None:
        assert simulate(self.schedule).peak == (1,)
        early = parse("0F0 0F1 0R0 0R1 0B0 0B1")
        assert simulate(early).peak == (2,)

    def test_bytes(self) -> None:
        costs = Costs(activation_bytes=100, input_bytes=7)
        assert simulate(self.schedule, costs).peak_bytes == (7 + 7 + 100,)
        assert simulate(gpipe(1, 3), costs).peak_bytes == (300,)

    def test_one_microbatch_only(self) -> None:
        mixed = parse("0F0 0F1 0R0 0B0 0B1")
        costs = Costs(activation_bytes=100, input_bytes=7)
        assert simulate(mixed).peak == (2,)
        assert simulate(mixed, costs).peak_bytes == (200,)

    def test_in_two_halves(self) -> None:
        halves = parse("0F0 0F1 0R0 0I0 0R1 0I1 0W0 0W1")
        costs = Costs(activation_bytes=100, input_bytes=7, input_gradient_frees=60)
        assert simulate(halves, costs).peak_bytes == (140,)


@given(random_schedules())
def test_bytes_of_one_each_are_the_count(schedule: Schedule) -> None:
    simulation = simulate(schedule, Costs(activation_bytes=1))
    assert simulation.peak_bytes == simulation.peak


@given(random_schedules())
def test_in_the_end_nothing_is_held(schedule: Schedule) -> None:
    costs = Costs(activation_bytes=100, input_bytes=7, input_gradient_frees=60)
    twice = Schedule.from_rows([[*row, *row] for row in schedule.rows()])
    # Running the step again on top of what it left would raise the peak if anything were left.
    assert peak_bytes(twice, costs) == peak_bytes(schedule, costs)


def test_bytes_may_be_of_any_size_and_kind() -> None:
    huge = 10**20
    assert simulate(gpipe(1, 3), Costs(activation_bytes=huge)).peak_bytes == (3 * huge,)
    assert simulate(gpipe(1, 3), Costs(activation_bytes=0.5)).peak_bytes == (1.5,)
    third = Costs(activation_bytes=Fraction(1, 3))
    assert simulate(gpipe(1, 2), third).peak_bytes == (Fraction(2, 3),)


@pytest.mark.parametrize("name", ["input_bytes", "input_gradient_frees"])
def test_a_part_is_no_more_than_the_whole(name: str) -> None:
    message = f"costs: {name} of stage 1 is 5, more than its activation_bytes, 4: it is a part"
    sizes = {"activation_bytes": [5, 4], name: 5}
    with pytest.raises(ScheduleError, match=message):
        simulate(gpipe(2, 2), Costs(**sizes))  # type: ignore[arg-type]  # names come as a parameter


def test_i_may_hold_more_than_f() -> None:
    """Of a stack of Linear, W needs every input and every output's gradient: twice what F kept."""
    schedule = parse("0F0 0F1 0I0 0I1 0W0 0W1")
    costs = Costs(activation_bytes=4, input_gradient_frees=-4)
    assert simulate(schedule, costs).peak_bytes == (16,)
