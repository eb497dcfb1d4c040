"""A simulation drawn as an SVG picture: one row per rank, time from left to right.

A box is one action, as wide as it takes, with the number of its microbatch; where a rank holds
several stages, its later ones are drawn in lighter shades. Boxes on the critical path have a dark
edge. Pointing at a box shows what it is and when it runs. The file needs nothing beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from stageline.errors import ScheduleError
from stageline.scheduling.action import Kind
from stageline.scheduling.costs import number_text
from stageline.scheduling.drawing import WORDS
from stageline.scheduling.simulator import Simulation, TimedAction, title

MOST_ACTIONS = 50_000
"""Beyond this no browser is happy, and no reader."""

COLORS = {
    Kind.FORWARD: (70, 118, 200),
    Kind.BACKWARD: (56, 148, 98),
    Kind.INPUT_GRADIENT: (36, 150, 160),
    Kind.WEIGHT_GRADIENT: (222, 156, 44),
    Kind.RECOMPUTE: (146, 96, 180),
    Kind.REDUCE: (120, 120, 120),
}
INK, GREY, LANE = "#222", "#777", "#f1f1f3"

ROW, BOX = 28, 22
MARGIN, TOP, GAP = 70, 66, 24
NARROWEST, WIDEST = 640, 12_000
LETTER = 6.2
"""Width of a digit, in pixels at the size of labels."""


def to_svg(simulation: Simulation) -> str:
    """Return the picture as the text of an SVG file.

    >>> from stageline.scheduling import simulate
    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(to_svg(simulate(one_f_one_b(num_stages=2, num_microbatches=2)))[:58])
    <svg xmlns="http://www.w3.org/2000/svg" width="734" height

    Raises:
        ScheduleError: There is far too much to draw.
    """
    if len(simulation.times.end) > MOST_ACTIONS:
        raise ScheduleError(
            f"a picture of {len(simulation.times.end)} actions would be no picture: "
            f"draw at most {MOST_ACTIONS}, with fewer microbatches or ranks"
        )
    sheet = _Sheet.of(simulation)
    width, height = MARGIN + sheet.width + GAP, sheet.bottom + 58
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            _text(GAP, 24, title(simulation.schedule), size=15, weight="bold"),
            *_legend(simulation),
            *_lanes(simulation, sheet),
            *_axis(sheet),
            _text(GAP, sheet.bottom + 44, _figures(simulation)),
            "</svg>",
            "",
        ]
    )


@dataclass(frozen=True)
class _Sheet:
    """How time becomes pixels.

    Attributes:
        total: The makespan.
        width: How many pixels that is.
        bottom: Where the lanes end.
    """

    total: float
    width: int
    bottom: int

    @classmethod
    def of(cls, simulation: Simulation) -> _Sheet:
        """Choose the scale: room for the microbatch number in all but the shortest tenth."""
        times = simulation.times
        lengths = sorted(length for length in times.duration.tolist() if length > 0)
        total = float(times.unit.ticks(simulation.T))
        digits = len(str(max(simulation.schedule.num_microbatches - 1, 0)))
        short = lengths[len(lengths) // 10] if lengths else 1
        wanted = (total / short if total else 1) * (LETTER * digits + 6)
        width = round(min(max(wanted, NARROWEST), WIDEST))
        bottom = TOP + ROW * simulation.schedule.num_ranks
        return cls(float(simulation.T), width, bottom)

    def x(self, time: float) -> float:
        return MARGIN + (time / self.total * self.width if self.total else 0)


def _lanes(simulation: Simulation, sheet: _Sheet) -> Iterator[str]:
    critical = {step.action for step in simulation.critical_path}
    for rank in range(simulation.schedule.num_ranks):
        y = TOP + rank * ROW
        yield _text(MARGIN - 8, y + 15, f"rank {rank}", anchor="end")
        yield f'<rect x="{MARGIN}" y="{y}" width="{sheet.width}" height="{BOX}" fill="{LANE}"/>'
        line = simulation.timeline(rank)
        stages = sorted({at.action.stage for at in line})
        # The critical path comes last: its dark edges then lie on top.
        for at in sorted(line, key=lambda at: at.action in critical):
            shade = stages.index(at.action.stage) / len(stages)
            yield _box(at, y, sheet, shade=shade, is_critical=at.action in critical)


def _box(at: TimedAction, y: int, sheet: _Sheet, *, shade: float, is_critical: bool) -> str:
    begin, end = sheet.x(float(at.start)), sheet.x(float(at.end))
    fill, ink = _fill(at.action.kind, shade)
    edge = f' stroke="{INK}" stroke-width="1.4"' if is_critical else ' stroke="#fff"'
    tip = f"{at.action}: {number_text(at.start)} .. {number_text(at.end)}"
    label = str(at.action.microbatch) if at.action.kind is not Kind.REDUCE else ""
    middle = ""
    if label and end - begin >= LETTER * len(label) + 2:
        middle = _text((begin + end) / 2, y + 15, label, size=11, fill=ink, anchor="middle")
    return (
        f'<g><title>{tip}</title><rect x="{begin:.2f}" y="{y}" width="{end - begin:.2f}" '
        f'height="{BOX}" fill="{fill}"{edge}/>{middle}</g>'
    )


def _fill(kind: Kind, shade: float) -> tuple[str, str]:
    """Return the colour of a box, lighter for later stages, and that of the text on it."""
    red, green, blue = (round(part + (255 - part) * shade * 0.9) for part in COLORS[kind])
    is_light = 0.3 * red + 0.59 * green + 0.11 * blue > 150
    return f"#{red:02x}{green:02x}{blue:02x}", INK if is_light else "#fff"


def _axis(sheet: _Sheet) -> Iterator[str]:
    y = sheet.bottom + 4
    yield f'<path d="M{MARGIN} {y}H{MARGIN + sheet.width}" stroke="{GREY}" fill="none"/>'
    if not sheet.total:
        return
    step = _nice(sheet.total / (sheet.width / 90))
    for tick in range(math.floor(sheet.total / step + 1e-9) + 1):
        x = sheet.x(tick * step)
        yield f'<path d="M{x:.2f} {y}v5" stroke="{GREY}" fill="none"/>'
        yield _text(x, y + 18, f"{tick * step:.10g}", size=11, fill=GREY, anchor="middle")


def _nice(least: float) -> float:
    """Return the next step of 1, 2 or 5 times a power of ten.

    >>> _nice(0.3), _nice(30), _nice(99)
    (0.5, 50.0, 100.0)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _legend(simulation: Simulation) -> Iterator[str]:
    x = float(GAP)
    for kind in sorted(simulation.schedule.kinds() & WORDS.keys()):
        fill, _ = _fill(kind, 0)
        yield f'<rect x="{x:.0f}" y="36" width="14" height="14" fill="{fill}"/>'
        yield _text(x + 19, 47, f"{kind.letter} {WORDS[kind]}")
        x += 42 + 7 * len(WORDS[kind])
    yield f'<rect x="{x:.0f}" y="36" width="14" height="14" fill="#fff" stroke="{INK}"/>'
    words = "critical path"
    if any(len(np.unique(row["stage"])) > 1 for row in simulation.schedule.arrays):
        words += "   (lighter: a later stage of the rank)"
    yield _text(x + 19, 47, words)


def _figures(simulation: Simulation) -> str:
    activations = max(simulation.peak_activations, default=0)
    return (
        f"T {number_text(simulation.T)}   span {number_text(simulation.span)}   "
        f"bubble {float(simulation.bubble):.1%}, of the span {float(simulation.span_bubble):.1%}   "
        f"peak {number_text(activations)} activations"
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    weight: str = "normal",
    fill: str = INK,
    anchor: str = "start",
) -> str:
    more = f' font-weight="{weight}"' if weight != "normal" else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return (
        f'<text x="{x:.2f}" y="{y:.0f}" font-size="{size}" fill="{fill}"{more} '
        f'xml:space="preserve">{escape(words)}</text>'
    )
