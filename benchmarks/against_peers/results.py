"""What races have shown, kept in files: a run may do some of the cases, tables show all."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from datetime import date
from typing import Any

from environments import ROOT
from models import CASES, Case

Heats = dict[int, list[float]]
LOGS = ROOT / "build" / "against_peers"


@dataclass
class Outcome:
    """What a case has shown.

    Attributes:
        case: Which.
        order: The names of its entries, as they stand in tables.
        seconds: Of a step, by entry and number of the heat: one for each turn it had there.
        cpu: Seconds of CPU time of a step, all threads and processes together, likewise.
        failures: Why an entry is not among them, or was wrong.
        untied: Entries that train copies of a block which is one block.
        versions: Of the packages that took part.
        load: What the machine was busy with, this race included: 1-minute averages.
        day: When it was.
    """

    case: Case
    order: list[str]
    seconds: dict[str, Heats] = field(default_factory=dict)
    cpu: dict[str, Heats] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    day: str = field(default_factory=lambda: str(date.today()))


def save(outcome: Outcome) -> None:
    """Keep the results of a case, instead of those that it had before."""
    kept = {each.name: getattr(outcome, each.name) for each in fields(outcome)}
    kept["case"] = outcome.case.letter
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / f"{outcome.case.letter}.json").write_text(json.dumps(kept))


def saved() -> list[Outcome]:
    """Return the last results of every case that has any."""
    files = [LOGS / f"{letter}.json" for letter in CASES]
    kept = [json.loads(file.read_text()) for file in files if file.exists()]
    return [_restored(each) for each in kept]


def _restored(kept: dict[str, Any]) -> Outcome:
    kept["case"] = CASES[kept["case"]]
    for what in ("seconds", "cpu"):  # in JSON the numbers of heats are words
        heats = kept[what].items()
        kept[what] = {name: {int(heat): xs for heat, xs in of.items()} for name, of in heats}
    return Outcome(**kept)
