"""Schedules move between torch.distributed.pipelining and here as CSV."""

from __future__ import annotations

import pytest
from hypothesis import given

from stageline.errors import ScheduleError
from stageline.scheduling import Schedule, order_transfers, parse
from stageline.scheduling.schedules import chimera, dualpipe_v, zb_v
from tests.scheduling.families import RUNNABLE, example
from tests.scheduling.random_schedules import random_schedules


def test_torch_writes_and_we_read() -> None:
    """What ``_dump_csv`` of torch 2.13 writes for a zero-bubble schedule, waits and all."""
    assert parse("0F0,0F1,,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n") == parse("""
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1""")


def test_pairs_transfers_and_reductions_have_words_in_torch() -> None:
    words = "0F0,0SEND_F0,0UNSHARD,1RECV_F0,(1F7; 0B3)OVERLAP_F_B,1SEND_B0,0RECV_B0,1REDUCE_GRAD"
    schedule = parse(words)
    assert str(schedule) == "0F0 0F0>1 1F0<0 1F7&0B3 1B0>0 0B0<1 1REDUCE"
    assert schedule.csv() == words.replace("0UNSHARD,", "").replace("; ", ";")


def test_the_csv_of_dualpipe_v() -> None:
    assert dualpipe_v(4, 4).csv().splitlines()[0] == (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,"
        "3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3"
    )


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_family_there_and_back(name: str) -> None:
    schedule = example(name, num_ranks=4, num_microbatches=9)
    assert parse(schedule.csv()) == schedule
    assert parse(order_transfers(schedule).csv()) == order_transfers(schedule)


@given(random_schedules())
def test_any_schedule_there_and_back(schedule: Schedule) -> None:
    assert parse(order_transfers(schedule).csv()) == order_transfers(schedule)


def test_torch_reads_what_we_write() -> None:
    actions = pytest.importorskip("torch.distributed.pipelining.schedules")
    for schedule in (zb_v(8, 8), order_transfers(zb_v(8, 8)), dualpipe_v(8, 8)):
        for word in schedule.csv().replace("\n", ",").split(","):
            assert str(actions._Action.from_str(word)) == word


def test_a_row_without_actions_keeps_its_place() -> None:
    schedule = parse("0F0\nrank 1:\n1F0")
    assert parse(schedule.csv()) == schedule


def test_two_copies_cannot_be_said_in_csv() -> None:
    with pytest.raises(ScheduleError, match=r"2 copies of the model, .* no word: use text\(\)"):
        chimera(2, 2).csv()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("0RECV_F0", "line 1, column 5: '0RECV_F0': there is no stage before stage 0"),
        ("0SEND_X0", "line 1, column 5: '0SEND_X0' is not an action"),
        ("(0F0;0F1)OVERLAP_F_B", "line 1, column 5: .*: a pair is a forward and a backward"),
        ("(0F0;0B0)TOGETHER", "line 1, column 5: .* is not an action"),
    ],
)
def test_a_wrong_cell_is_reported_with_its_place(word: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse(f"0F0,{word}")
