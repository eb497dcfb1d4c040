"""Bars of every case as one SVG: throughput over the plain model on one thread."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lineup import AGAIN, LIMIT, REPLAYED
from results import Outcome
from table import Line, lines

LEFT, RIGHT, BAR, GAP, SCALE = 270, 60, 14, 5, 210
COLORS = {"stageline": "#2f6fb5", "plain": "#8a8a8a", "limit": "#d9a400"}
PEER = "#b5572f"


def svg(outcomes: Sequence[Outcome]) -> str:
    """Return the picture.

    Args:
        outcomes: One per case; each becomes a panel.
    """
    panels: list[str] = []
    top = 30
    width = LEFT + RIGHT + 2 * SCALE
    for outcome in outcomes:
        drawn, height = _panel(outcome, top)
        panels.append(drawn)
        top += height
    body = "\n".join(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{top}" fill="white"/>\n'
        f'<text x="10" y="18" font-size="13">Throughput, plain model on one thread = 1 '
        "(two cores)</text>\n"
        f"{body}\n</svg>\n"
    )


def _panel(outcome: Outcome, top: int) -> tuple[str, int]:
    shown = [
        line
        for line in lines(outcome)
        if line.over_plain is not None and line.name not in (AGAIN, REPLAYED)
    ]
    title = f"({outcome.case.letter}) {outcome.case.title}"
    parts = [f'<text x="10" y="{top + 16}" font-weight="bold">{escape(title)}</text>']
    first = top + 24
    bottom = first + len(shown) * (BAR + GAP)
    for tenths in (5, 10, 15, 20):
        x = LEFT + tenths * SCALE // 10
        dash = "" if tenths == 10 else ' stroke-dasharray="2 3"'
        parts.append(
            f'<line x1="{x}" y1="{first - 2}" x2="{x}" y2="{bottom}" stroke="#bbb"{dash}/>'
            f'<text x="{x}" y="{bottom + 11}" text-anchor="middle" fill="#777">{tenths / 10}</text>'
        )
    parts += [_bar(line, first + i * (BAR + GAP)) for i, line in enumerate(shown)]
    return "\n".join(parts), bottom + 28 - top


def _bar(line: Line, y: int) -> str:
    assert line.over_plain is not None
    length = min(line.over_plain, 2.2) * SCALE
    return (
        f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(line.name)}</text>'
        f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR}" fill="{_color(line.name)}"/>'
        f'<text x="{LEFT + length + 5:.0f}" y="{y + 11}">{line.over_plain:.2f}</text>'
    )


def _color(name: str) -> str:
    first = "limit" if name == LIMIT else name.split()[0].rstrip(",")
    return COLORS.get(first, PEER)
