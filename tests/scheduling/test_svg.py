"""The picture of a simulation, as a file."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Schedule, parse, simulate
from stageline.scheduling.schedules import chimera, gpipe, one_f_one_b
from tests.scheduling.zero_bubble import zb_h1, zb_v

SVG = "{http://www.w3.org/2000/svg}"


def drawing(schedule: Schedule, costs: Costs | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(simulate(schedule, costs).svg())


def texts(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def boxes(picture: ElementTree.Element) -> dict[str, dict[str, str]]:
    """Return the attributes of each box, by what pointing at it shows."""
    found = {}
    for group in picture.iter(f"{SVG}g"):
        title, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert box is not None
        found[title.text or ""] = box.attrib
    return found


def test_every_action_is_a_box_as_long_as_it_takes() -> None:
    found = boxes(drawing(one_f_one_b(2, 2)))
    assert {tip.split(":")[0] for tip in found} == {
        *("0F0", "0F1", "0B0", "0B1"),
        *("1F0", "1F1", "1B0", "1B1"),
    }
    widths = {tip: float(box["width"]) for tip, box in found.items()}
    assert widths["0B1: 7 .. 9"] == pytest.approx(2 * widths["0F0: 0 .. 1"], abs=0.05)


def test_boxes_of_a_rank_do_not_overlap() -> None:
    lanes: dict[str, list[tuple[float, float]]] = {}
    for box in boxes(drawing(zb_h1(4, 8), Costs(3, 5, latency=1))).values():
        begin = float(box["x"])
        lanes.setdefault(box["y"], []).append((begin, begin + float(box["width"])))
    assert len(lanes) == 4
    for lane in lanes.values():
        lane.sort()
        assert all(end <= begin + 0.02 for (_, end), (begin, _) in itertools.pairwise(lane))


def test_title_ranks_legend_axis_and_figures() -> None:
    words = texts(drawing(zb_v(2, 4)))
    assert words[0] == "zb-v: 4 stages on 2 ranks, 4 microbatches"
    assert {"F forward", "I input gradient", "W weight gradient", "rank 0", "rank 1"} <= set(words)
    assert "critical path   (lighter: a later stage of the rank)" in words
    assert {"0", "5", "10", "15", "20", "25"} <= set(words)
    figures = "T 25   span 24   bubble 4.0%, of the span 0.0%   peak 2 activations"
    assert words[-1] == figures


def test_kinds_and_stages_have_colors_of_their_own() -> None:
    found = boxes(drawing(zb_v(1, 1)))
    assert len({box["fill"] for box in found.values()}) == 6


def test_the_stages_of_two_copies_of_the_model_are_told_apart() -> None:
    picture = drawing(chimera(4, 4))
    fills = {box["fill"] for tip, box in boxes(picture).items() if "F" in tip}
    assert len(fills) == 2, "every rank holds a stage of either copy"
    assert "critical path   (lighter: a later stage of the rank)" in texts(picture)


def test_the_critical_path_is_outlined() -> None:
    found = boxes(drawing(gpipe(2, 2), Costs([1, 5], [1, 5])))
    dark = {tip.split(":")[0] for tip, box in found.items() if box["stroke"] != "#fff"}
    assert dark == {"0F0", "1F0", "1F1", "1B0", "1B1", "0B1"}


def test_numbers_that_do_not_fit_are_left_out() -> None:
    words = texts(drawing(gpipe(1, 3), Costs(1, 10_000)))
    assert [words.count(str(microbatch)) for microbatch in (1, 2)] == [1, 1]


def test_a_name_is_escaped() -> None:
    svg = simulate(Schedule.from_rows(list(gpipe(1, 1).rows()), "<&>")).svg()
    assert "&lt;&amp;&gt;: 1 stages" in svg
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)", svg), "the file stands alone"


def test_what_takes_no_time_can_be_drawn() -> None:
    assert "T 0" in texts(drawing(gpipe(2, 2), Costs(0, 0)))[-1]
    assert "T 0" in texts(drawing(parse("rank 0:")))[-1]


def test_far_too_much_is_refused() -> None:
    with pytest.raises(ScheduleError, match="a picture of 51200 actions would be no picture"):
        simulate(gpipe(8, 3200)).svg()
