"""``stageline schedules``: every schedule that is built in, what it needs and what it costs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from stageline.scheduling import schedules
from stageline.scheduling.schedules import Family
from stageline.wording import aligned

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]  # argparse gives its type no public name

LEGEND = """
p ranks, m microbatches, v stages per rank, r the rank. F, B = I + W: times of a rank's share.
Bubble: what T exceeds m(F+B) by; "span": what span exceeds it by.
Peak: activations of one microbatch in a rank's share of the model."""


def add_to(commands: Commands) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "schedules",
        help="list the schedules with what they need and what they cost",
        description="List every schedule that is built in: the sizes it takes, which stages a rank "
        "holds, how long its ranks wait, how many activations they hold.",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    entries = [_entry(schedules.family(name)) for name in schedules.NAMES]
    if arguments.json:
        print(json.dumps(entries))
        return 0
    titles = list(entries[0])
    columns = {title: [entry[title] for entry in entries] for title in titles}
    print(aligned(columns, left=titles))
    print(LEGEND)
    return 0


def _entry(family: Family) -> dict[str, str]:
    return {
        "name": family.name,
        "what it does": family.summary,
        "needs": family.needs or "any size",
        "stages/rank": family.stages_text,
        "placement": family.placement,
        "bubble": family.bubble,
        "peak": family.peak,
        "use": "runs" if family.refusal is None else "simulate only",
    }
