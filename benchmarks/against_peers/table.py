"""What a race has shown, as tables for people."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.tools.pages import processor
from lineup import AGAIN, LIMIT, OURS, PLAIN, REPLAYED, TORCH
from results import Outcome


@dataclass(frozen=True)
class Line:
    """One entry of one case; ratios are above 1 where the entry is the faster one."""

    name: str
    milliseconds: float
    cpu: float
    spread: float
    over_torch: float | None
    over_plain: float | None
    of_limit: float | None
    of_replayed: float | None


def ratio(outcome: Outcome, over: str, under: str) -> float | None:
    """Return the median of a ratio taken in every heat: load that comes and goes cancels."""
    above, below = outcome.seconds.get(over, {}), outcome.seconds.get(under, {})
    ratios = [above[heat] / below[heat] for heat in above.keys() & below.keys()]
    return statistics.median(ratios) if ratios else None


def lines(outcome: Outcome) -> list[Line]:
    return [
        Line(
            name,
            1000 * statistics.median(outcome.seconds[name].values()),
            1000 * statistics.median(outcome.cpu[name].values()),
            _spread([*outcome.seconds[name].values()]),
            ratio(outcome, TORCH, name),
            ratio(outcome, PLAIN, name),
            ratio(outcome, LIMIT, name),
            ratio(outcome, REPLAYED, name),
        )
        for name in outcome.order
        if name in outcome.seconds
    ]


def _spread(seconds: Sequence[float]) -> float:
    """Return the width of the middle half, relative to the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def markdown(outcome: Outcome) -> str:
    """Return the table of a case."""
    case = outcome.case
    text = [
        f"**({case.letter}) {case.title}.**",
        "",
        "| | ms | spread | CPU ms | over torch 1F1B | over plain | of the limit | replayed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines(outcome):
        mark = " (untied copies)" if line.name in outcome.untied else ""
        compared = (line.over_torch, line.over_plain, line.of_limit, line.of_replayed)
        ratios = [_cell(x) for x in compared]
        cells = [f"{line.milliseconds:.2f}", f"{line.spread:.0%}", f"{line.cpu:.2f}", *ratios]
        text.append(f"| {line.name}{mark} | {' | '.join(cells)} |")
    for name, why in outcome.failures.items():
        text.append(f"| {name} | {why.replace('|', '/')} | | | | | | |")
    same = ratio(outcome, OURS, AGAIN)
    if same is not None:
        fewest = min(map(len, outcome.seconds.values()))
        heats = f"{len(outcome.seconds[OURS])} heats, every contestant in {fewest} or more"
        text += ["", f"A/A: {same:.2f}; {heats}; load {_range(outcome.load)}."]
    return "\n".join(text)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else "unknown"


def setting(outcomes: Sequence[Outcome]) -> str:
    """Return days, versions and machine in a sentence or two."""
    versions: dict[str, str] = {}
    for outcome in outcomes:
        versions |= outcome.versions
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    days = " and ".join(sorted({outcome.day for outcome in outcomes}))
    return (
        f"{days}; {named}, Python {platform.python_version()}; {os.cpu_count()} cores of "
        f"{processor()}, {platform.system()}."
    )
