"""``stageline schedules``: one line for every schedule."""

from __future__ import annotations

import json

import pytest

from stageline.cli import main
from stageline.scheduling import schedules


def test_every_schedule_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedules"]) == 0
    title, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert title.split()[:1] == ["name"]
    assert tuple(line.split()[0] for line in lines) == schedules.NAMES
    assert all(len(line) <= 180 for line in lines)


def test_what_a_line_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedules", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["zb-h2"] == {
        "name": "zb-h2",
        "what it does": "zb-h1 filled twice as deep",
        "needs": "m >= 2p",
        "stages/rank": "1 or more",
        "placement": "consecutive",
        "bubble": "(p-1)(F+I-2W), span",
        "peak": "2p - 1",
        "use": "runs",
    }
    assert entries["interleaved"]["stages/rank"] == "v (2)"
    assert entries["interleaved"]["needs"] == "any size"
    assert entries["zb-v"]["stages/rank"] == "2"
    assert entries["chimera"]["use"] == "simulate only"
