"""The built-in families: their rows, their sizes, their errors."""

from __future__ import annotations

import inspect
import itertools
import re

import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Kind, Schedule, order_transfers, parse, schedules
from stageline.scheduling.passes import keep_microbatches
from stageline.scheduling.schedules import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    sequential,
    zb_v,
)
from stageline.scheduling.schedules.looping import fitting_groups
from stageline.scheduling.schedules.rows import contiguous
from tests.scheduling.families import RUNNABLE, TWO_COPIES, example, sizes

NOT_ASCENDING = ("looped-bfs", "forward-only")
GRADIENTS = (
    (Kind.BACKWARD, Kind.INPUT_GRADIENT),
    (Kind.BACKWARD, Kind.WEIGHT_GRADIENT),
)
FAMILIES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "sequential": sequential,
    "forward-only": forward_only,
}


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
    for stages, ranks, microbatches in sizes(name, most_ranks=6, most_microbatches=12):
        schedule = schedules.build(name, stages, microbatches, num_ranks=ranks)
        assert schedule.name == name
        assert (schedule.num_stages, schedule.num_ranks) == (stages, ranks)
        assert schedule.num_microbatches == microbatches
        assert schedule.replicas == schedules.family(name).replicas
        assert schedule.check() is schedule
        assert parse(schedule.text()) == schedule


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_size_has_an_order_of_transfers(name: str) -> None:
    for stages, ranks, microbatches in sizes(name, most_ranks=5, most_microbatches=7):
        complete = order_transfers(schedules.build(name, stages, microbatches, num_ranks=ranks))
        assert complete.check() is complete
        assert parse(complete.text()) == complete


@pytest.mark.slow
@pytest.mark.parametrize("name", schedules.NAMES)
def test_larger_sizes_pass_the_check(name: str) -> None:
    for stages, ranks, microbatches in sizes(name, most_ranks=11, most_microbatches=25):
        schedules.build(name, stages, microbatches, num_ranks=ranks).check()


@pytest.mark.parametrize("name", schedules.NAMES)
def test_a_smaller_batch_of_any_family(name: str) -> None:
    for ranks, microbatches in itertools.product((2, 4), range(1, 12)):
        schedule = example(name, num_ranks=ranks, num_microbatches=microbatches).check()
        assert schedule.num_microbatches == microbatches
        assert schedule.name == name


def test_a_batch_too_small_leaves_out_what_is_not_there() -> None:
    assert schedules.fitted("zb-h2", 4, 9) == schedules.zb_h2(4, 9)
    assert schedules.fitted("zb-h2", 4, 3) == keep_microbatches(schedules.zb_h2(4, 8), 3)
    assert schedules.fitted("dualpipe-v", 4, 3) == keep_microbatches(schedules.dualpipe_v(4, 4), 3)


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name not in NOT_ASCENDING])
def test_backwards_ascend_in_microbatch(name: str) -> None:
    for stages, ranks, microbatches in sizes(name, most_ranks=4, most_microbatches=9):
        schedule = schedules.build(name, stages, microbatches, num_ranks=ranks)
        for rank, row in enumerate(schedule.rows()):
            for kinds, stage in itertools.product(GRADIENTS, schedule.stages_of(rank)):
                mine = [action for action in row if action.stage == stage and action.kind in kinds]
                order = [action.microbatch for action in mine]
                assert order == sorted(order)


def test_placement_is_contiguous_and_larger_ranks_come_first() -> None:
    assert one_f_one_b(7, 1, num_ranks=3).placement == (0, 0, 0, 1, 1, 2, 2)
    for stages in range(1, 20):
        for ranks in range(1, stages + 1):
            sizes = [len(held) for held in contiguous(stages, ranks)]
            assert sum(sizes) == stages
            assert sizes == sorted(sizes, reverse=True)
            assert max(sizes) - min(sizes) <= 1


def test_the_names_build_the_families() -> None:
    assert (
        *FAMILIES,
        *("interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v"),
        *("v-half", "v-min", "dualpipe-v", "varuna", "dualpipe", "chimera", "bitpipe"),
    ) == schedules.NAMES
    assert TWO_COPIES == ["dualpipe", "chimera", "bitpipe"]
    for name, function in FAMILIES.items():
        assert schedules.build(name, 4, 3, num_ranks=2) == function(4, 3, num_ranks=2)
        assert schedules.build(name, 4, 3) == function(4, 3, num_ranks=4)
    for name in schedules.NAMES:
        function = getattr(schedules, schedules.family(name).function.__name__)
        assert schedules.build(name, 8, 16) == function(8, 16)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_file_opens_with_a_picture_and_a_promise(name: str) -> None:
    module = inspect.getmodule(schedules.family(name).function)
    assert module is not None
    assert module.__doc__ is not None
    title, picture, *promise = module.__doc__.split("\n\n")
    assert title.endswith(".")
    assert picture.startswith("    rank 0 ")
    assert promise
    if sizes_drawn := re.match(r"    p = (\d+) ranks, m = (\d+) microbatches", promise[0]):
        ranks, microbatches = map(int, sizes_drawn.groups())
        assert picture == drawn(example(name, num_ranks=ranks, num_microbatches=microbatches))


def drawn(schedule: Schedule) -> str:
    """Return a picture as it stands in docstrings, which are written in ASCII."""
    halves = Kind.INPUT_GRADIENT in schedule.kinds()
    costs = Costs(1, 2, pair=2) if halves else Costs(1, 1)
    _, *lines, _, _ = schedule.picture(costs, width=200).splitlines()
    table = str.maketrans({"\u2502": "  ", "\u00b7": ".", "\u2550": "=", "\u2500": "-"})
    return "\n".join(f"    {line}" for line in lines).translate(table)


def test_options_go_to_the_families_that_take_them() -> None:
    wide = interleaved(12, 8, num_ranks=4, group_size=8)
    assert schedules.build("interleaved", 12, 8, num_ranks=4, group_size=8) == wide
    assert schedules.build("looped-bfs", 12, 8, stages_per_rank=3).num_ranks == 4
    with pytest.raises(ScheduleError, match="1f1b takes no group_size: leave it out"):
        schedules.build("1f1b", 4, 8, group_size=4)


def test_stages_and_ranks_unless_told() -> None:
    assert [schedules.family(name).num_stages(4) for name in ("1f1b", "zb-v")] == [4, 8]
    assert [schedules.family(name).num_ranks(8) for name in ("1f1b", "zb-v")] == [8, 4]
    assert schedules.family("zb-v").num_ranks(1) == 1


def test_placements() -> None:
    assert interleaved(8, 4, num_ranks=4).placement == (0, 1, 2, 3, 0, 1, 2, 3)
    assert zb_v(8, 4).placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert schedules.bitpipe(8, 4).stages_of(0) == (0, 3, 4, 7)


def test_groups_of_microbatches() -> None:
    """As in Megatron: from the ranks to all, no remainder or one of at least the ranks."""
    assert fitting_groups(4, 12) == [4, 6, 7, 8, 12]
    assert fitting_groups(4, 3) == [3]
    for size in fitting_groups(4, 12):
        assert interleaved(8, 12, num_ranks=4, group_size=size).check()


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
        f"unknown schedule 'zzz': choose one of {', '.join(schedules.NAMES)}."
    )


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize(
    ("stages", "microbatches", "ranks", "message"),
    [
        (0, 1, None, "num_stages=0"),
        (4, 0, None, "num_microbatches=0"),
        (4, -1, None, "num_microbatches=-1"),
        (2, 1, 0, "num_ranks=0"),
        (2, 1, 3, "for every rank, got num_stages=2 for num_ranks=3"),
    ],
)
def test_numbers_that_make_no_pipeline(
    name: str, stages: int, microbatches: int, ranks: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=f"^{name} needs .*{message}"):
        schedules.build(name, stages, microbatches, num_ranks=ranks)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("zb-h2 4 7", "zb-h2 needs at least 8 microbatches, got num_microbatches=7 (two per rank "
         "fill the pipeline): use num_microbatches=8"),
        ("zb-v 5 4", "zb-v needs 2 stages for every rank, got num_stages=5: use num_stages=4 or 6"),
        ("zb-v 6 4 4", "zb-v needs 2 stages for every rank, got num_stages=6 for num_ranks=4: "
         "use num_stages=8 or num_ranks=3"),
        ("interleaved 6 4 4", "interleaved needs equally many stages for every rank, got "
         "num_stages=6 for num_ranks=4: use num_stages=4 or 8"),
        ("dualpipe-v 8 6", "dualpipe-v needs at least 8 microbatches, got num_microbatches=6 (one "
         "per stage fills the pipeline): use num_microbatches=8"),
        ("dualpipe 4 9", "dualpipe needs at least 8 microbatches and an even number, got "
         "num_microbatches=9 (one per rank and direction): use num_microbatches=8 or 10"),
        ("dualpipe 3 8", "dualpipe needs an even number of ranks, got num_ranks=3: use "
         "num_ranks=2 or 4"),
        ("dualpipe 8 16 4", "dualpipe needs one stage for every rank, got num_stages=8 for "
         "num_ranks=4: use num_stages=4 or num_ranks=8"),
        ("chimera 4 6", "chimera needs a multiple of 4 microbatches, got num_microbatches=6 (half "
         "a unit per direction): use num_microbatches=4 or 8"),
        ("bitpipe 6 6", "bitpipe needs an even number of ranks, got num_ranks=3: use "
         "num_ranks=2 or 4"),
    ],
)  # fmt: skip
def test_a_size_that_does_not_fit_is_refused_with_the_nearest_that_does(
    build: str, message: str
) -> None:
    name, stages, microbatches, *ranks = build.split()
    with pytest.raises(ScheduleError) as caught:
        schedules.build(
            name, int(stages), int(microbatches), num_ranks=int(ranks[0]) if ranks else None
        )
    assert str(caught.value) == message


def test_a_group_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        interleaved(8, 12, num_ranks=4, group_size=5)
    assert str(caught.value) == (
        "interleaved needs groups of at least one microbatch per rank, the last one too, got "
        "group_size=5 for num_microbatches=12 on 4 ranks: use group_size=4 or 6"
    )


def test_seventeen_million_actions_are_rows_of_numpy() -> None:
    """No Python object per action: a sixteenth of 1F1B for 1024 ranks has a million of them."""
    schedule: Schedule = one_f_one_b(1024, 512)
    assert len(schedule) == 2 * 1024 * 512
    assert schedule.row(1023)[:2] == parse("1023F0 1023B0").row(0)
