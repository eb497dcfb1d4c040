"""Every fault of a schedule has its sentence, and all come at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from stageline.errors import ScheduleError
from stageline.scheduling import Schedule, order_transfers, parse
from stageline.scheduling.checking import find_faults
from stageline.scheduling.schedule import ROW_DTYPE
from stageline.scheduling.schedules import one_f_one_b
from tests.scheduling.random_schedules import random_schedules

FAULTS = {
    "a rank without work": (
        "0F0 0B0 \n rank 1:",
        ["rank 1: the row computes nothing: give it a stage or leave the rank out"],
    ),
    "a rank that only transfers": (
        "0F0 \n 0REDUCE",
        ["rank 1: the row computes nothing: give it a stage or leave the rank out"],
    ),
    "a hole in the stages": (
        "0F0 \n 2F0",
        ["stage 1 appears in no row: number them from 0 without a hole"],
    ),
    "stages that do not begin at 0": (
        "2F0 \n 3F0 \n 7F0",
        [
            "stage 0 .. 1 appears in no row: number them from 0 without a hole",
            "stage 4 .. 6 appears in no row: number them from 0 without a hole",
        ],
    ),
    "a hole in the microbatches": (
        "0F0 0F2 \n 1F0 1F2",
        ["microbatch 1 appears in no row: number them from 0 without a hole"],
    ),
    "a stage on two ranks": (
        "0F0 1F0 1B0 0B0 \n 1F1 0F1 0B1 1B1",
        [
            "stage 0 stands on ranks 0 and 1: a stage runs on one rank",
            "stage 1 stands on ranks 0 and 1: a stage runs on one rank",
            "deadlock: rank 1 waits at 1F1 for 0F1",
        ],
    ),
    "a forward is missing": (
        "0F0 0F1 0F2 0F3 \n 1F0",
        ["rank 1: 1F1 .. 1F3 is missing: run every microbatch forward on every stage"],
    ),
    "a forward stands twice": (
        "0F0 0F1 0F0",
        ["rank 0: 0F0 stands 2 times: run it once"],
    ),
    "a backward is missing": (
        "0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1",
        ["rank 1: 1B1 is missing: run every microbatch backward on every stage, or none"],
    ),
    "a backward stands twice": (
        "0F0 0B0 0B0 0B0",
        ["rank 0: 0B0 stands 3 times: run it once"],
    ),
    "a backward whole and in halves": (
        "0F0 0F1 0B0 0I0 0W0 0I1 0W1",
        ["rank 0: 0B0 stands beside I or W: run B, or I and W, not both"],
    ),
    "a backward and a weight gradient": (
        "0F0 0B0 0W0",
        ["rank 0: 0B0 stands beside I or W: run B, or I and W, not both"],
    ),
    "a weight gradient is missing": (
        "0F0 0F1 0I0 0I1 0W1",
        ["rank 0: 0W0 is missing: a backward in two halves needs I and W"],
    ),
    "an input gradient is missing": (
        "0F0 0W0",
        [
            "rank 0: 0B0 is missing: run every microbatch backward on every stage, or none",
            "rank 0: 0I0 is missing: a backward in two halves needs I and W",
        ],
    ),
    "a weight gradient stands twice": (
        "0F0 0I0 0W0 0W0",
        ["rank 0: 0W0 stands 2 times: run it once"],
    ),
    "backward before forward": (
        "0F0 0B1 0F1 0B0",
        ["rank 0: 0B1 stands before 0F1: move it after that"],
    ),
    "input gradient before forward": (
        "0I0 0F0 0W0",
        ["rank 0: 0I0 stands before 0F0: move it after that"],
    ),
    "weight gradient before input gradient": (
        "0F0 0W0 0I0",
        ["rank 0: 0W0 stands before 0I0: move it after that"],
    ),
    "recompute before forward": (
        "0R0 0F0 0B0",
        ["rank 0: 0R0 stands before 0F0: move it after that"],
    ),
    "recompute after backward": (
        "0F0 0B0 0R0",
        ["rank 0: 0B0 stands before 0R0: move it after that"],
    ),
    "recompute after input gradient": (
        "0F0 0I0 0R0 0W0",
        ["rank 0: 0I0 stands before 0R0: move it after that"],
    ),
    "recompute for nothing": (
        "0F0 0R0",
        ["rank 0: 0R0 feeds no backward: leave it out"],
    ),
    "recompute twice": (
        "0F0 0R0 0R0 0B0",
        ["rank 0: 0R0 stands 2 times: run it once"],
    ),
    "reduction before the last gradient": (
        "0F0 0F1 0I0 0I1 0W0 0REDUCE 0W1",
        ["rank 0: 0REDUCE stands before 0W1: move it after the last gradient of the stage"],
    ),
    "reduction twice": (
        "0F0 0B0 0REDUCE 0REDUCE",
        ["rank 0: 0REDUCE stands 2 times: run it once"],
    ),
    "ranks that wait for each other": (
        "0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1",
        ["deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1"],
    ),
    "a rank that waits for itself": (
        "1F0 0F0",
        ["deadlock: rank 0 waits at 1F0 for 0F0"],
    ),
}

TRANSFER_FAULTS = {
    "to a stage that is not the next": (
        "0F0 0F0>2 \n 1F0<0 1F0 1F0>2 \n 2F0<1 2F0",
        [
            "rank 0: 0F0>2: this value goes to stage 1: correct it",
        ],
    ),
    "from a stage that does not exist": (
        "0F0<1 0F0 0F0>1 \n 1F0<0 1F0 1F0>2",
        [
            "rank 0: 0F0<1: this value comes from no other stage: correct it",
            "rank 1: 1F0>2: this value goes to no other stage: correct it",
        ],
    ),
    "on a rank that does not hold the stage": (
        "0F0 \n 1F0<0 1F0 0F0>1",
        ["rank 1: 0F0>1: stage 0 is not on this rank: move it"],
    ),
    "between stages of one rank": (
        "0F0 0F0>1 1F0<0 1F0",
        [
            "rank 0: 0F0>1: stage 1 is on this rank too: remove it",
            "rank 0: 1F0<0: stage 0 is on this rank too: remove it",
        ],
    ),
    "a send is missing": (
        "0F0 0F1 0F0>1 \n 1F0<0 1F1<0 1F0 1F1",
        ["rank 0: 0F1>1 is missing: stage 1 is on another rank"],
    ),
    "a receive is missing": (
        "0F0 0F1 0F0>1 0F1>1 \n 1F1<0 1F0 1F1",
        ["rank 1: 1F0<0 is missing: stage 0 is on another rank"],
    ),
    "the gradients are missing": (
        "0F0 0F1 0F0>1 0F1>1 0B0 0B1 \n 1F0<0 1F1<0 1F0 1F1 1B0 1B1",
        [
            "rank 1: 1B0>0 .. 1B1>0 is missing: stage 0 is on another rank",
            "rank 0: 0B0<1 .. 0B1<1 is missing: stage 1 is on another rank",
        ],
    ),
    "a value that nobody makes": (
        "0F0 0F0>1 0B0<1 \n 1F0<0 1F0 1B0>0",
        [
            "rank 1: 1B0>0 carries nothing: remove it",
            "rank 0: 0B0<1 carries nothing: remove it",
        ],
    ),
    "a value twice": (
        "0F0 0F0>1 0F0>1 \n 1F0<0 1F0",
        ["rank 0: 0F0>1 stands more than once: transfer each value once"],
    ),
    "a send before its maker": (
        "0F0>1 0F0 \n 1F0<0 1F0",
        ["rank 0: 0F0>1 stands before 0F0: send what is made"],
    ),
    "a gradient before its maker": (
        "0F0 0F0>1 0B0<1 0I0 0W0 \n 1F0<0 1F0 1B0>0 1I0 1W0",
        ["rank 1: 1B0>0 stands before 1I0: send what is made"],
    ),
    "a receive after its user": (
        "0F0 0F0>1 \n 1F0 1F0<0",
        ["rank 1: 1F0<0 stands after 1F0: receive before use"],
    ),
    "another order at each end": (
        "0F0 0F1 0F0>1 0F1>1 \n 1F1<0 1F0<0 1F0 1F1",
        ["rank 0 sends 0F0>1 where rank 1 receives 1F1<0: put both ends in one order"],
    ),
}


@pytest.mark.parametrize(("text", "faults"), FAULTS.values(), ids=FAULTS.keys())
def test_fault(text: str, faults: list[str]) -> None:
    assert find_faults(parse(text)) == faults


@pytest.mark.parametrize(("text", "faults"), TRANSFER_FAULTS.values(), ids=TRANSFER_FAULTS.keys())
def test_fault_of_transfers(text: str, faults: list[str]) -> None:
    found = find_faults(parse(text))
    assert [fault for fault in found if fault in faults] == faults


@pytest.mark.parametrize(
    "name", sorted(TRANSFER_FAULTS.keys() - {"to a stage that is not the next"})
)
def test_a_fault_of_transfers_is_reported_once(name: str) -> None:
    text, faults = TRANSFER_FAULTS[name]
    assert find_faults(parse(text)) == faults


def test_the_message_of_one_fault_is_one_line() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse("0F0 0B0 0B0", name="mine").check()
    assert str(caught.value) == "schedule 'mine': rank 0: 0B0 stands 2 times: run it once"


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse("""
            0F0 0B0 0F1 0B1 0B1
            1F0 1F1 1B0 1W0 1B1 1B1>0
            3F1 3B1 3F1
            rank 3:
        """).check()
    assert str(caught.value).splitlines() == [
        "schedule 'custom' has 12 faults:",
        "- rank 3: the row computes nothing: give it a stage or leave the rank out",
        "- stage 2 appears in no row: number them from 0 without a hole",
        "- rank 0: 0B1 stands 2 times: run it once",
        "- rank 1: 1B0 stands beside I or W: run B, or I and W, not both",
        "- rank 2: 3F0 is missing: run every microbatch forward on every stage",
        "- rank 2: 3F1 stands 2 times: run it once",
        "- rank 2: 3B0 is missing: run every microbatch backward on every stage, or none",
        "- rank 0: 0F0>1 .. 0F1>1 is missing: stage 1 is on another rank",
        "- rank 1: 1F0<0 .. 1F1<0 is missing: stage 0 is on another rank",
        "- rank 1: 1B0>0 is missing: stage 0 is on another rank",
        "- rank 0: 0B0<1 .. 0B1<1 is missing: stage 1 is on another rank",
        "- deadlock: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1",
    ]


def test_a_slip_of_the_pen_is_found_without_gigabytes() -> None:
    assert find_faults(parse("0F0 0F2147483647 \n 2000000000F0")) == [
        "stage 1 .. 1999999999 appears in no row: number them from 0 without a hole",
        "microbatch 1 .. 2147483646 appears in no row: number them from 0 without a hole",
        "rank 1: 2000000000F2147483647 is missing: run every microbatch forward on every stage",
    ]


def test_rows_that_are_all_empty() -> None:
    assert len(find_faults(Schedule((np.empty(0, ROW_DTYPE),) * 2))) == 2


def test_no_backward_at_all_is_fine() -> None:
    assert find_faults(parse("0F0 0F1 \n 1F0 1F1")) == []


def test_whole_and_split_backwards_may_be_mixed() -> None:
    assert find_faults(parse("0F0 0F1 0B0 0I1 0W1 \n 1F0 1I0 1W0 1F1 1B1")) == []


@given(random_schedules())
def test_what_can_run_has_no_faults(schedule: Schedule) -> None:
    assert find_faults(schedule) == []
    assert find_faults(order_transfers(schedule)) == []


@settings(max_examples=30)
@given(random_schedules())
def test_whatever_is_left_out_is_missed(schedule: Schedule) -> None:
    """Take out any one action of a complete schedule: the check must notice."""
    complete = order_transfers(schedule)
    rows = list(complete.rows())
    for rank, row in enumerate(rows):
        for index in {0, len(row) // 2, len(row) - 1}:
            if row[index].kind.letter == "R":
                continue  # a recompute is free to be there or not
            shorter = [*rows]
            shorter[rank] = row[:index] + row[index + 1 :]
            rest = Schedule.from_rows(shorter)
            # Without its only B, a schedule is a fine forward-only one.
            assert find_faults(rest) or not rest.has_backward


def test_check_returns_the_schedule() -> None:
    schedule = one_f_one_b(2, 2)
    assert schedule.check() is schedule
