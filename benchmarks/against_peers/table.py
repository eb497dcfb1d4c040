"""What a race has shown, as tables for people."""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks.tools.pages import processor
from lineup import AGAIN, LIMIT, OURS, PLAIN, REPLAYED, TORCH
from results import Outcome

RESAMPLINGS = 400


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
    """Return the median of a ratio taken in every lap: load that comes and goes cancels."""
    ratios = [each for heat in ratios_of(outcome, over, under) for each in heat]
    return statistics.median(ratios) if ratios else None


def ratios_of(outcome: Outcome, over: str, under: str) -> list[list[float]]:
    """Return ratios of one lap, by heat; of one heat, if one of the two has run it in one go."""
    above, below = outcome.seconds.get(over, {}), outcome.seconds.get(under, {})
    found = []
    for heat in sorted(above.keys() & below.keys()):
        pair = (above[heat], below[heat])
        if len(pair[0]) != len(pair[1]):
            pair = ([statistics.median(pair[0])], [statistics.median(pair[1])])
        found.append([a / b for a, b in zip(*pair, strict=True)])
    return found


def lines(outcome: Outcome) -> list[Line]:
    return [
        Line(
            name,
            1000 * statistics.median(chain(*outcome.seconds[name].values())),
            1000 * statistics.median(chain(*outcome.cpu[name].values())),
            _spread([*chain(*outcome.seconds[name].values())]),
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
    text += ["", *_closing(outcome)]
    return "\n".join(text)


def _closing(outcome: Outcome) -> list[str]:
    """Return what both copies of ours have shown together, and how much was measured."""
    if AGAIN not in outcome.seconds or OURS not in outcome.seconds:
        return []
    fewest = min(map(len, outcome.seconds.values()))
    heats, laps = len(outcome.seconds[OURS]), outcome.case.laps
    return [
        f"1F1B in processes, both copies: {_known(outcome, TORCH)} over torch's, "
        f"{_known(outcome, LIMIT)} of the limit; A/A {ratio(outcome, OURS, AGAIN):.2f}; {heats} "
        f"heats of {laps} lap{'s' * (laps > 1)}, every contestant in {fewest} or more; "
        f"load {_range(outcome.load)}."
    ]


def _known(outcome: Outcome, over: str) -> str:
    """Return the median ratio of both copies, and its range in 19 of 20 resamplings of heats."""
    copies = [ratios_of(outcome, over, name) for name in (OURS, AGAIN)]
    heats = [[*a, *b] for a, b in zip(*copies, strict=True)]
    if not heats:
        return "unknown"
    draw = random.Random(0)
    medians = sorted(
        statistics.median(chain(*draw.choices(heats, k=len(heats)))) for _ in range(RESAMPLINGS)
    )
    low, high = medians[RESAMPLINGS // 40], medians[-1 - RESAMPLINGS // 40]
    return f"{statistics.median(chain(*heats)):.3f} ({low:.2f} to {high:.2f})"


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
