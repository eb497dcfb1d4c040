"""The picture of a schedule."""

from __future__ import annotations

import re

import pytest

from stageline.scheduling import Costs, Kind, Schedule, parse, picture, schedules, simulate
from stageline.scheduling.drawing import COLORS, PLAIN
from stageline.scheduling.schedules import forward_only, gpipe, one_f_one_b
from tests.scheduling.families import example

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def lines_of(schedule: Schedule, costs: Costs | None = None, width: int = 200) -> list[str]:
    return picture(schedule, costs, width=width).splitlines()


def test_one_f_one_b() -> None:
    assert lines_of(one_f_one_b(3, 4)) == [
        "1f1b: 3 stages on 3 ranks, 4 microbatches",
        "rank 0 │F0 F1 F2 ·  ·  ·  ·  B0═══ F3 B1═══ ·  B2═══ ·  B3═══",
        "rank 1 │·  F0 F1 ·  ·  B0═══ F2 B1═══ F3 B2═══ ·  B3═══",
        "rank 2 │·  ·  F0 B0═══ F1 B1═══ F2 B2═══ F3 B3═══",
        "F forward   B backward   · wait   F3: microbatch 3",
        "T 18   span 18   bubble 33.3%   peak 3 2 1",
    ]


def test_several_stages_on_a_rank_are_told_apart() -> None:
    assert lines_of(one_f_one_b(4, 1, num_ranks=2), Costs(1, 1))[1:4] == [
        "rank 0 │0F0 1F0 ·   ·   ·   ·   1B0 0B0",
        "rank 1 │·   ·   2F0 3F0 3B0 2B0",
        "F forward   B backward   · wait   2F3: stage 2, microbatch 3",
    ]


def test_every_kind_is_drawn_and_explained() -> None:
    assert lines_of(parse("0F0 0R0 0I0 0W0 0REDUCE"), Costs(1, 4))[1:3] == [
        "rank 0 │F0 R0 I0═══ W0═══",
        "F forward   I input gradient   W weight gradient   R recompute   · wait   "
        "F3: microbatch 3",
    ]


def test_large_microbatch_numbers_keep_their_digits() -> None:
    first, second = lines_of(forward_only(2, 12))[1:3]
    assert first == "rank 0 │F0─ F1─ F2─ F3─ F4─ F5─ F6─ F7─ F8─ F9─ F10 F11"
    assert second == "rank 1 │·   F0─ F1─ F2─ F3─ F4─ F5─ F6─ F7─ F8─ F9─ F10 F11"


@pytest.mark.parametrize(
    "costs",
    [
        Costs(3, 5, latency=1),
        Costs(7, 11, latency=13),
        Costs([1.0, 1.3, 0.7, 1.1], 2.9, latency=0.3),
        Costs(18522, 27423, latency=601),
    ],
)
def test_every_label_is_whole_whatever_the_costs(costs: Costs) -> None:
    schedule = one_f_one_b(4, 11)
    rows = lines_of(schedule, costs, width=10**6)[1:5]
    for rank, line in enumerate(rows):
        labels = re.findall(r"[FB][0-9]+", line)
        assert labels == [str(action)[1:] for action in schedule.row(rank)]


def test_cells_are_as_long_as_their_actions() -> None:
    line = lines_of(gpipe(1, 2), Costs(2, 6))[1]
    assert line == "rank 0 │F0 F1 B0══════ B1══════"


def test_a_dot_never_touches_the_cell_after_it() -> None:
    # Rank 1 starts in column 4. Dots stand every 3 columns, but one in column 3 would touch.
    assert lines_of(forward_only(2, 1), Costs(3, latency=1))[2] == "rank 1 │·   F0"


def test_actions_without_duration_take_no_room() -> None:
    assert lines_of(gpipe(1, 2), Costs(1, 0))[1] == "rank 0 │F0 F1"
    assert lines_of(gpipe(1, 2), Costs(0, 0))[1] == "rank 0 │"


def test_costs_of_very_different_sizes_do_not_fill_the_memory() -> None:
    line = lines_of(gpipe(1, 2), Costs(1, 10**12), width=10**9)[1]
    assert len(line) < 70_000
    assert "B0═" in line


def test_a_simulation_draws_itself() -> None:
    assert simulate(gpipe(2, 2)).picture(width=80) == picture(gpipe(2, 2), width=80)


def test_a_wide_picture_goes_on_below_in_even_bands() -> None:
    assert lines_of(forward_only(2, 8), width=26) == [
        "forward-only: 2 stages on 2 ranks, 8 microbatches",
        "time    0",
        "rank 0 │F0 F1 F2 F3 F4",
        "rank 1 │·  F0 F1 F2 F3",
        "time    5",
        "rank 0 │F5 F6 F7",
        "rank 1 │F4 F5 F6 F7",
        "F forward   · wait   F3: microbatch 3",
        "T 9   span 8   bubble 11.1%   peak 1 1",
    ]


def test_of_a_long_picture_the_middle_is_left_out() -> None:
    lines = lines_of(forward_only(2, 99), width=28)
    assert lines[1:-2] == [
        "time    0",
        "rank 0 │F0─ F1─ F2─ F3─ F4─",
        "rank 1 │·   F0─ F1─ F2─ F3─",
        "time    5",
        "rank 0 │F5─ F6─ F7─ F8─ F9─",
        "rank 1 │F4─ F5─ F6─ F7─ F8─",
        "...     and so on, until time 95",
        "time    95",
        "rank 0 │F95 F96 F97 F98",
        "rank 1 │F94 F95 F96 F97 F98",
    ]


@pytest.mark.parametrize("width", [1, 10, 40, 80, 133])
@pytest.mark.parametrize("name", schedules.NAMES)
def test_no_row_is_wider_than_the_terminal(name: str, width: int) -> None:
    drawn = example(name, num_ranks=10, num_microbatches=30).picture(width=width)
    one_cell = len("rank 9 │19F29 ")
    for line in drawn.splitlines():
        if line.startswith("rank"):
            assert len(line) <= max(width, one_cell)


def test_the_terminal_gives_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "26")
    assert picture(forward_only(2, 8)) == picture(forward_only(2, 8), width=26)


@pytest.mark.parametrize("width", [30, 200])
def test_colors_paint_the_same_picture(width: int) -> None:
    painted = picture(one_f_one_b(3, 9), color=True, width=width)
    plain = picture(one_f_one_b(3, 9), width=width)
    rows = [line for line in painted.splitlines() if "│" in line]
    assert [ANSI.sub("", row).rstrip() for row in rows] == [
        row for row in plain.splitlines() if "│" in row
    ]
    for row in rows:
        codes = ANSI.findall(row)
        assert set(codes) <= {PLAIN, *COLORS.values()}
        assert not codes or codes[-1] == PLAIN, "paint must not run on into the next line"


def test_the_blank_between_two_cells_is_not_painted() -> None:
    line = picture(forward_only(1, 2), color=True, width=80).splitlines()[1]
    blue = COLORS[Kind.FORWARD]
    assert line == f"rank 0 │{blue}F0{PLAIN} {blue}F1{PLAIN}"


def test_a_schedule_draws_itself() -> None:
    schedule = one_f_one_b(2, 2)
    costs = Costs(1, 1)
    assert schedule.picture(costs, width=80) == picture(schedule, costs, width=80)
