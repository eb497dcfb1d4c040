"""Actions that overlap, and stages that stand on two ranks: text, check, simulation, passes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Schedule, order_transfers, parse, simulate
from stageline.scheduling.passes import forward_part, forwards_first, keep_microbatches
from stageline.scheduling.schedules import dualpipe, dualpipe_v


def paired() -> Schedule:
    """Rank 0 runs the forward of microbatch 1 together with the backward of microbatch 0."""
    return parse("0F0 0F1&0B0 0B1 \n 1F0 1B0 1F1 1B1")


def test_a_pair_is_part_of_the_text() -> None:
    assert paired().text().startswith("0F0 0F1&0B0 0B1")
    assert parse(paired().text()) == paired()
    assert paired() != parse(paired().text().replace("&", " "))
    assert [str(action) for action in paired().row(0)][1:3] == ["0F1", "0B0"]


def test_copies_are_part_of_the_text() -> None:
    schedule = dualpipe(4, 8)
    assert schedule.text().startswith("replicas: 2\n0F0 ")
    assert parse(schedule.text()) == schedule
    assert parse(schedule.text().removeprefix("replicas: 2\n")) != schedule


@pytest.mark.parametrize("schedule", [dualpipe(4, 8), dualpipe_v(4, 4)], ids=lambda s: s.name)
def test_copies_and_pickles_are_equal(schedule: Schedule) -> None:
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert other == schedule
        assert hash(other) == hash(schedule)


def test_a_pair_takes_the_time_of_both_unless_told() -> None:
    schedule = parse("0F0 0F1&0B0 0B1")
    assert simulate(schedule, Costs(1, 2)).T == 6
    assert simulate(schedule, Costs(1, 2, pair=2)).T == 5
    assert simulate(schedule, Costs(1, 2, pair=2)).busy == (5,)


def test_a_pair_begins_when_both_can_and_ends_as_one() -> None:
    #                                                          0F0 0F1 0B0 0B1
    apart = simulate(parse(paired().text().replace("&", " ")), Costs(1, 2))
    assert (apart.start[0], apart.end[0]) == ((0, 1, 4, 7), (1, 2, 6, 9))
    together = simulate(paired(), Costs(1, 2))
    assert (together.start[0], together.end[0]) == ((0, 4, 7, 10), (1, 7, 7, 12))
    assert together.start[1] == (1, 2, 7, 8), "1F1 waits for the end of the pair"


def test_what_a_pair_waits_for_may_be_a_deadlock() -> None:
    """The backward of the pair needs what its own forward makes."""
    text = "0F0&2B0 0B0 \n 1F0 2F0 1B0"
    with pytest.raises(ScheduleError, match="stage 2 stands on ranks 0 and 1"):
        parse(text).check()
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0F0 for 1B0, rank 1 waits"):
        parse("0F0&0B0 \n 1F0 1B0").check()
    parse("0F0 0B0 \n 1F0 1B0").check()


def test_the_picture_of_a_pair_is_one_cell() -> None:
    assert paired().picture(Costs(1, 2), width=120).splitlines()[1:3] == [
        "rank 0 │F0 ·  ·  ·  F1&B0─── ·  ·  ·  B1═══",
        "rank 1 │·  F0 B0═══ ·  ·  ·  F1 B1═══",
    ]


@pytest.mark.parametrize("positions", [[0], [1], [2, 2], [-1], [9]])
def test_a_pair_must_be_one(positions: list[int]) -> None:
    rows = parse("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1").arrays
    pairs = (np.array([], dtype=np.int64), np.array(positions, dtype=np.int64))
    if positions == [1]:
        assert Schedule(rows, pairs=pairs).pairs[1].tolist() == [1]
    else:
        with pytest.raises(ScheduleError, match="rank 1: a pair is a forward with a backward"):
            Schedule(rows, pairs=pairs)


def test_passes_keep_what_is_left_of_the_pairs() -> None:
    whole = dualpipe_v(4, 6)
    for count in (1, 3, 5):
        kept = keep_microbatches(whole, count).check()
        assert bool(kept.pairs) == (count > 1)
        assert parse(kept.text()) == kept
    assert forward_part(whole).pairs == ()
    assert forwards_first(whole).check().pairs == ()
    assert order_transfers(whole).pairs == ()
    assert order_transfers(whole).compute_only().check().text() == whole.text().replace("&", " ")


def test_a_copy_is_checked() -> None:
    good = "0F0 1F0 1B0 0B0 \n 0F1 1F1 1B1 0B1"
    assert parse(f"replicas: 2 \n {good}").check().stages_of(1) == (0, 1)
    with pytest.raises(ScheduleError, match=r"stage 0 stands on ranks 0 and 1: .* on one rank"):
        parse(good).check()
    with pytest.raises(ScheduleError, match="ranks 0 and 1 and 2: a stage runs on one rank for ea"):
        parse("replicas: 2 \n 0F0 0B0 \n 0F1 0B1 \n 0F2 0B2").check()


def test_a_microbatch_stays_with_one_copy() -> None:
    text = "replicas: 2 \n 0F0 1F0 1B1 0B0 \n 0F1 1F1 1B0 0B1"
    with pytest.raises(ScheduleError) as caught:
        parse(text).check()
    assert "stage 1 runs microbatch 0 on ranks 0 and 1: a microbatch stays with one" in str(
        caught.value
    )


def test_two_copies_cannot_be_run() -> None:
    schedule = dualpipe(4, 8)
    assert schedule.refusal is not None
    assert schedule.refusal.startswith("dualpipe needs 2 copies of the weights")
    with pytest.raises(ScheduleError, match="it can be simulated and drawn, not run"):
        order_transfers(schedule)


def test_a_model_has_at_least_one_copy() -> None:
    with pytest.raises(ScheduleError, match="replicas=0"):
        parse("replicas: 0 \n 0F0")
