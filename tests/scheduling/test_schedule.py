"""A schedule as data: what it says about itself, and that it cannot change."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Action, Kind, Schedule, order_transfers, parse
from stageline.scheduling.schedule import ROW_DTYPE
from stageline.scheduling.schedules import forward_only, one_f_one_b

V = """
    0F0 3F0 3B0 0B0
    1F0 2F0 2B0 1B0
"""


def test_sizes_and_placement_follow_from_the_rows() -> None:
    schedule = parse(V)
    assert schedule.num_ranks == 2
    assert schedule.num_stages == 4
    assert schedule.num_microbatches == 1
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.stages_of(0) == (0, 3)
    assert schedule.stages_of(1) == (1, 2)
    assert len(schedule) == 8


def test_a_receive_does_not_place_a_stage() -> None:
    assert parse("0F0 0F0>1 \n 1F0<0 1F0").placement == (0, 1)
    assert parse("0F0 1F0<0 \n 1F0").placement == (0, 1)


def test_placement_of_a_schedule_that_check_refuses() -> None:
    assert parse("0F0 \n 0F1 2F0").placement == (0, -1, 1)


def test_rows_are_seen_as_actions() -> None:
    rows = [
        [Action(0, Kind.FORWARD, 0), Action(0, Kind.SEND_FORWARD, 0, peer=1)],
        [Action(1, Kind.RECEIVE_FORWARD, 0, peer=0), Action(1, Kind.FORWARD, 0)],
    ]
    schedule = Schedule.from_rows(rows)
    assert schedule.row(0) == tuple(rows[0])
    assert list(schedule.rows()) == [tuple(row) for row in rows]


def test_kinds_and_backward() -> None:
    assert one_f_one_b(2, 2).kinds() == {Kind.FORWARD, Kind.BACKWARD}
    assert one_f_one_b(2, 2).has_backward
    assert not forward_only(2, 2).has_backward
    assert parse("0F0 0I0 0W0").has_backward


def test_compute_only_takes_out_the_transfers_and_nothing_else() -> None:
    plain = parse("0F0 0B0 0REDUCE \n 1F0 1B0")
    assert order_transfers(plain) != plain
    assert order_transfers(plain).compute_only() == plain


def test_equality_and_hash_are_those_of_the_rows() -> None:
    mine, other = parse(V, name="mine"), parse(V, name="other")
    assert mine == other
    assert hash(mine) == hash(other)
    assert mine != parse(V.replace("3B0 0B0", "0B0 3B0"))
    assert mine != parse(V + "4F0")
    assert mine != V


def test_a_schedule_cannot_be_changed() -> None:
    schedule = one_f_one_b(2, 2)
    with pytest.raises(ValueError, match="read-only"):
        schedule.arrays[0]["stage"][0] = 1
    with pytest.raises(AttributeError):
        schedule.name = "other"  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_are_equal_and_frozen_too(duplicate: object) -> None:
    assert callable(duplicate)
    twin = duplicate(one_f_one_b(2, 2))
    assert twin == one_f_one_b(2, 2)
    assert twin.name == "1f1b"
    assert not twin.arrays[0].flags.writeable


def test_an_action_takes_13_bytes() -> None:
    assert one_f_one_b(4, 8).arrays[0].nbytes == 13 * 16


def test_arrays_of_another_type_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank 1: a row is a 1-d array"):
        Schedule((np.empty(0, ROW_DTYPE), np.zeros(3)))  # type: ignore[arg-type]  # the point
    with pytest.raises(ScheduleError, match=r"rank 0: a row is a 1-d array"):
        Schedule((np.empty((1, 1), ROW_DTYPE),))
    with pytest.raises(ScheduleError, match="at least one rank"):
        Schedule(())


@pytest.mark.parametrize(
    "numbers",
    [
        (10, 0, 0, -1),
        (Kind.FORWARD, -1, 0, -1),
        (Kind.FORWARD, 0, -1, -1),
        (Kind.FORWARD, 0, 0, 1),
        (Kind.SEND_FORWARD, 0, 0, -1),
        (Kind.SEND_FORWARD, 0, 0, -2),
        (Kind.REDUCE, 0, 1, -1),
    ],
)
def test_arrays_obey_the_rules_of_action(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ScheduleError, match="rank 0: the row holds an action that cannot be"):
        Schedule((np.array([numbers], ROW_DTYPE),))


def test_repr_is_short() -> None:
    text = repr(one_f_one_b(2, 3))
    assert text == "<Schedule '1f1b': 2 stages on 2 ranks, 3 microbatches, 12 actions>"
