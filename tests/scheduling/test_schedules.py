"""The built-in families: their rows, their sizes, their errors."""

from __future__ import annotations

import itertools

import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Kind, order_transfers, parse, schedules
from stageline.scheduling.schedules import forward_only, gpipe, one_f_one_b, sequential
from stageline.scheduling.schedules.rows import contiguous

GRID = [
    (stages, ranks, microbatches)
    for stages, microbatches in itertools.product(range(1, 9), range(1, 13))
    for ranks in sorted({1, (stages + 1) // 2, stages})
]


def test_one_f_one_b_looks_like_its_picture() -> None:
    assert one_f_one_b(3, 4) == parse("""
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""")


def test_gpipe_looks_like_its_picture() -> None:
    assert gpipe(3, 4) == parse("""
        0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
        2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3""")


def test_sequential_looks_like_its_picture() -> None:
    assert sequential(3, 2) == parse("""
        0F0 0B0 0F1 0B1
        1F0 1B0 1F1 1B1
        2F0 2B0 2F1 2B1""")


def test_forward_only_looks_like_its_picture() -> None:
    assert forward_only(3, 2) == parse("""
        0F0 0F1
        1F0 1F1
        2F0 2F1""")


def test_several_stages_of_a_rank_run_as_one_unit() -> None:
    assert one_f_one_b(5, 2, num_ranks=2) == parse("""
        0F0 1F0 2F0 0F1 1F1 2F1 2B0 1B0 0B0 2B1 1B1 0B1
        3F0 4F0 4B0 3B0 3F1 4F1 4B1 3B1""")


def test_fewer_microbatches_than_stages() -> None:
    assert one_f_one_b(4, 1) == parse("0F0 0B0 \n 1F0 1B0 \n 2F0 2B0 \n 3F0 3B0")
    assert one_f_one_b(4, 2) == parse("""
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
        3F0 3B0 3F1 3B1""")


@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_size_passes_the_check_and_the_text(name: str) -> None:
    for stages, ranks, microbatches in GRID:
        schedule = schedules.build(name, stages, microbatches, num_ranks=ranks)
        assert schedule.name == name
        assert (schedule.num_stages, schedule.num_ranks) == (stages, ranks)
        assert schedule.num_microbatches == microbatches
        complete = order_transfers(schedule)
        assert complete.check() is complete
        assert parse(complete.text()) == complete


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "sequential"])
def test_backwards_ascend_in_microbatch(name: str) -> None:
    for stages, ranks, microbatches in GRID:
        schedule = schedules.build(name, stages, microbatches, num_ranks=ranks)
        for rank, row in enumerate(schedule.rows()):
            backwards = [action for action in row if action.kind is Kind.BACKWARD]
            for stage in schedule.stages_of(rank):
                order = [action.microbatch for action in backwards if action.stage == stage]
                assert order == list(range(microbatches))


def test_placement_is_contiguous_and_larger_ranks_come_first() -> None:
    assert one_f_one_b(7, 1, num_ranks=3).placement == (0, 0, 0, 1, 1, 2, 2)
    for stages in range(1, 20):
        for ranks in range(1, stages + 1):
            sizes = [len(held) for held in contiguous(stages, ranks)]
            assert sum(sizes) == stages
            assert sizes == sorted(sizes, reverse=True)
            assert max(sizes) - min(sizes) <= 1


def test_the_names_build_the_families() -> None:
    assert schedules.NAMES == ("gpipe", "1f1b", "sequential", "forward-only")
    families = (gpipe, one_f_one_b, sequential, forward_only)
    for name, family in zip(schedules.NAMES, families, strict=True):
        assert schedules.build(name, 4, 3, num_ranks=2) == family(4, 3, num_ranks=2)
        assert schedules.build(name, 4, 3) == family(4, 3, num_ranks=4)


@pytest.mark.parametrize(
    ("name", "near"), [("gpip", "gpipe"), ("1F1B", "1f1b"), ("forward_only", "forward-only")]
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ScheduleError, match=f"unknown schedule '{name}'.*Did you mean '{near}'"):
        schedules.build(name, 2, 2)


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.build("zzz", 2, 2)
    assert str(caught.value) == (
        "unknown schedule 'zzz': choose one of gpipe, 1f1b, sequential, forward-only."
    )


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize(
    ("stages", "microbatches", "ranks", "message"),
    [
        (0, 1, None, "num_stages=0"),
        (2, 0, None, "num_microbatches=0"),
        (2, -1, None, "num_microbatches=-1"),
        (2, 1, 0, "num_ranks=0"),
        (2, 1, 3, "needs a stage for every rank, got num_stages=2 for num_ranks=3"),
    ],
)
def test_numbers_that_make_no_pipeline(
    name: str, stages: int, microbatches: int, ranks: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=f"{name} needs .*{message}|{name} {message}"):
        schedules.build(name, stages, microbatches, num_ranks=ranks)
