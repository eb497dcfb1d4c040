"""The text form of a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.scheduling import Schedule, order_transfers, parse
from stageline.scheduling.text import format
from tests.scheduling.random_schedules import random_schedules
from tests.scheduling.test_action import actions

any_rows = st.lists(st.lists(actions(), max_size=5), min_size=1, max_size=4)


@given(any_rows.map(Schedule.from_rows))
def test_round_trip_of_any_rows(schedule: Schedule) -> None:
    assert parse(format(schedule)) == schedule


@given(random_schedules())
def test_round_trip_with_transfers(schedule: Schedule) -> None:
    complete = order_transfers(schedule)
    assert parse(complete.text(), complete.name) == complete


def test_comments_blank_lines_and_prefixes_are_free() -> None:
    assert parse("0F0 0B0\n1F0 1B0") == parse("""
        # two ranks
        rank 0:  0F0   0B0   # the first

        rank 1 : 1F0\t1B0
    """)


def test_a_name_can_be_given() -> None:
    assert parse("0F0").name == "custom"
    assert parse("0F0", name="mine").name == "mine"


def test_a_wrong_word_is_reported_with_line_and_column() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse("0F0 0B0\n# comment\n  1F0 1X3")
    assert str(caught.value) == (
        "line 3, column 7: '1X3' is not an action such as 2F0 (letters F B I W R), "
        "a transfer 0F3>1 or 1F3<0, or 2REDUCE"
    )


def test_a_wrong_prefix_is_reported() -> None:
    with pytest.raises(ScheduleError, match="line 2, column 6: this is the row of rank 1, got '2'"):
        parse("rank 0: 0F0\nrank 2: 1F0")


@pytest.mark.parametrize("text", ["", "\n \n", "# nothing"])
def test_a_text_without_rows_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="the text holds no actions"):
        parse(text)


def test_an_empty_row_keeps_its_place() -> None:
    schedule = parse("0F0\nrank 1:\n1F0")
    assert [len(row) for row in schedule.arrays] == [1, 0, 1]
    assert schedule.text() == "0F0\nrank 1:\n1F0"
