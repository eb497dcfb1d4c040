"""A schedule drawn for the terminal: one line per rank, time from left to right.

    rank 0 │F0 F1 ·  ·  B0═══ ·  B1═══
    rank 1 │·  F0 B0═══ F1 B1═══

A cell is as long as its action takes and begins with the action; a dot is a wait. A picture wider
than the terminal goes on in bands below, and of a very long one the middle is left out.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from fractions import Fraction

from stageline.scheduling.action import Kind, action_text
from stageline.scheduling.costs import Costs, Number, number_text
from stageline.scheduling.schedule import Schedule
from stageline.scheduling.simulator import Simulation, simulate, title

WAIT = "·"
FILLS = {
    Kind.FORWARD: "─",
    Kind.BACKWARD: "═",
    Kind.INPUT_GRADIENT: "═",
    Kind.WEIGHT_GRADIENT: "═",
    Kind.RECOMPUTE: "─",
    Kind.REDUCE: " ",
}

COLORS = {
    Kind.FORWARD: "\x1b[97;44m",  # white on blue
    Kind.BACKWARD: "\x1b[30;42m",  # black on green
    Kind.INPUT_GRADIENT: "\x1b[30;46m",  # black on cyan
    Kind.WEIGHT_GRADIENT: "\x1b[30;43m",  # black on yellow
    Kind.RECOMPUTE: "\x1b[97;45m",  # white on magenta
}
PLAIN = "\x1b[0m"

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
    Kind.RECOMPUTE: "recompute",
}

MOST_CELLS = 20_000
"""How many cells a line has at most, whatever the costs."""

FIRST_BANDS, LAST_BANDS = 2, 1
"""How many bands of a very long picture are drawn: how it fills, and how it drains."""


def picture(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    color: bool = False,
    width: int | None = None,
) -> str:
    """Draw what every rank does over time.

    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> print(picture(one_f_one_b(num_stages=2, num_microbatches=2), width=80))
    1f1b: 2 stages on 2 ranks, 2 microbatches
    rank 0 │F0 F1 ·  ·  B0═══ ·  B1═══
    rank 1 │·  F0 B0═══ F1 B1═══
    F forward   B backward   · wait   F3: microbatch 3
    T 9   span 9   bubble 33.3%   peak 2 1

    Args:
        schedule: What to draw.
        costs: How long the actions are; B twice as long as F unless given.
        color: Whether to paint the cells, with ANSI codes.
        width: How many columns there are; those of the terminal unless given.

    Raises:
        ScheduleError: The schedule deadlocks, or the costs are for another number of stages.
    """
    return draw(simulate(schedule, costs), color=color, width=width)


def draw(simulation: Simulation, *, color: bool = False, width: int | None = None) -> str:
    """Draw what every rank did in a simulation; the arguments are those of ``picture``."""
    schedule = simulation.schedule
    sheet = _Sheet.of(simulation)
    lines = [_draw(rank, simulation, sheet) for rank in range(schedule.num_ranks)]
    columns = shutil.get_terminal_size().columns if width is None else width
    return "\n".join(
        [
            title(schedule),
            *_bands(lines, sheet, columns, color=color),
            _legend(schedule, sheet, color=color),
            simulation.figures(),
        ]
    )


@dataclass(frozen=True)
class _Sheet:
    """How time becomes columns.

    Attributes:
        unit: The shortest action that takes time; it gets one cell. Of costs that differ by
            orders of magnitude the short ones get less, and their labels are cut.
        cell: Columns of that cell: room for the longest label and one blank.
        names_stages: Whether labels say the stage: only where a rank holds several.
    """

    unit: Number
    cell: int
    names_stages: bool

    @classmethod
    def of(cls, simulation: Simulation) -> _Sheet:
        schedule = simulation.schedule
        lengths = [
            end - start
            for starts, ends in zip(simulation.start, simulation.end, strict=True)
            for start, end in zip(starts, ends, strict=True)
            if end > start
        ]
        names_stages = len(set(schedule.placement)) < schedule.num_stages
        longest = len(f"F{schedule.num_microbatches - 1}")
        if names_stages:
            longest += len(str(schedule.num_stages - 1))
        unit = max(min(lengths, default=1), _ceil_ratio(simulation.T, MOST_CELLS))
        return cls(unit, longest + 1, names_stages)

    def column(self, time: Number) -> int:
        if isinstance(time, float) or isinstance(self.unit, float):
            return math.floor(time / self.unit * self.cell + 0.5)
        # Exact, so that an action of one unit is one cell wide wherever it starts.
        return math.floor(Fraction(time) / self.unit * self.cell + Fraction(1, 2))


@dataclass
class _Line:
    """The characters of one rank, and the kind that paints each of them (None: no paint)."""

    characters: list[str]
    paint: list[Kind | None]

    def cut(self, begin: int, end: int, *, color: bool) -> str:
        if not color:
            return "".join(self.characters[begin:end]).rstrip()
        pieces = []
        painted: Kind | None = None
        for index in range(begin, min(end, len(self.characters))):
            if self.paint[index] is not painted:
                painted = self.paint[index]
                pieces.append(PLAIN if painted is None else COLORS[painted])
            pieces.append(self.characters[index])
        return "".join(pieces).rstrip() + (PLAIN if painted is not None else "")


def _draw(rank: int, simulation: Simulation, sheet: _Sheet) -> _Line:
    computed = simulation.schedule.compute_only()
    row = computed.arrays[rank].tolist()
    labels = _labels(row, sheet)
    for at in computed.pairs[rank].tolist() if computed.pairs else ():
        labels[at : at + 2] = [f"{labels[at]}&{labels[at + 1]}", ""]  # one cell, that of F
    num_columns = sheet.column(simulation.T)
    line = _Line([" "] * num_columns, [None] * num_columns)
    times = zip(simulation.start[rank], simulation.end[rank], strict=True)
    free = 0
    for (kind, _, _, _), label, (start, end) in zip(row, labels, times, strict=True):
        begin, stop = sheet.column(start), sheet.column(end)
        for column in range(free, begin - 1, sheet.cell):
            line.characters[column] = WAIT
        line.characters[begin:stop] = _cell(label, stop - begin, FILLS[Kind(kind)])
        # The last column of a cell stays blank: it parts the cell from the next.
        line.paint[begin : stop - 1] = [Kind(kind)] * (stop - 1 - begin)
        free = stop
    return line


def _labels(row: list[tuple[int, int, int, int]], sheet: _Sheet) -> list[str]:
    labels = [action_text(kind, stage, microbatch) for kind, stage, microbatch, _ in row]
    if sheet.names_stages:
        return labels
    stages = (str(stage) for _, stage, _, _ in row)
    return [label.removeprefix(stage) for label, stage in zip(labels, stages, strict=True)]


def _ceil_ratio(time: Number, parts: int) -> Number:
    """Return a part of a time, rounded up to whole numbers where time is counted in those."""
    return -(-time // parts) if isinstance(time, int) else time / parts


def _cell(label: str, size: int, fill: str) -> list[str]:
    if size <= len(label):
        return list(label[:size])
    return list(label.ljust(size - 1, fill) + " ")


def _bands(lines: list[_Line], sheet: _Sheet, columns: int, *, color: bool) -> list[str]:
    """Cut the lines to the width of the terminal, whole cells at a time."""
    names = [f"rank {rank}" for rank in range(len(lines))]
    margin = max(len(name) for name in names) + 1
    total = max(1, -(-len(lines[0].characters) // sheet.cell))
    most = max(1, (columns - margin - 1) // sheet.cell)
    begins, size = _cut(total, most)
    drawn = []
    for number, begin in enumerate(begins):
        if number and begin != begins[number - 1] + size:
            until = number_text(begin * sheet.unit)
            drawn.append(f"{'...':<{margin}} and so on, until time {until}")
        if len(begins) > 1:
            drawn.append(f"{'time':<{margin}} {number_text(begin * sheet.unit)}")
        for name, line in zip(names, lines, strict=True):
            text = line.cut(begin * sheet.cell, (begin + size) * sheet.cell, color=color)
            drawn.append(f"{name:<{margin}}│{text}")
    return drawn


def _cut(total: int, most: int) -> tuple[list[int], int]:
    """Return where the bands begin and how long they are, in cells.

    >>> _cut(total=30, most=20), _cut(total=100, most=20)
    (([0, 15], 15), ([0, 20, 80], 20))
    """
    num_bands = -(-total // most)
    if num_bands <= FIRST_BANDS + LAST_BANDS:
        even = -(-total // num_bands)
        return [band * even for band in range(num_bands)], even
    first = [band * most for band in range(FIRST_BANDS)]
    last = [total - band * most for band in range(LAST_BANDS, 0, -1)]
    return [*first, *last], most


def _legend(schedule: Schedule, sheet: _Sheet, *, color: bool) -> str:
    entries = []
    for kind in sorted(schedule.kinds() & WORDS.keys()):
        letter = f"{COLORS[kind]} {kind.letter} {PLAIN}" if color else kind.letter
        entries.append(f"{letter} {WORDS[kind]}")
    example = "2F3: stage 2, microbatch 3" if sheet.names_stages else "F3: microbatch 3"
    return "   ".join([*entries, f"{WAIT} wait", example])
