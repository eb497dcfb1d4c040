"""``stageline simulate``: figures as text and JSON, and one clear line for wrong input."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from stageline.cli import main
from stageline.scheduling import Costs
from stageline.scheduling.schedules import one_f_one_b

USUAL = ["simulate", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "8"]

Captured = pytest.CaptureFixture[str]


def test_text(capsys: Captured) -> None:
    assert main(USUAL) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 4 stages on 4 ranks, 8 microbatches",
        "T 33   span 33   bubble 27.3%   peak 4 3 2 1",
    ]


def test_json(capsys: Captured) -> None:
    assert main([*USUAL, "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == {
        "schedule": "1f1b",
        "num_ranks": 4,
        "num_stages": 4,
        "num_microbatches": 8,
        "T": 33,
        "span": 33,
        "bubble": pytest.approx(9 / 33),
        "busy": [24, 24, 24, 24],
        "peak": [4, 3, 2, 1],
    }
    assert '"T": 33,' in out, "an integer stays an integer"


def test_costs_are_exact(capsys: Captured) -> None:
    assert main([*USUAL, "--forward", "1/3", "--backward", "0.1", "--latency", "2.5"]) == 0
    # (8 + 4 - 1) * (1/3 + 1/10) + 2 * 5/2 * ((4 - 1) + (8 - 1) - ceil(7 / 4)) = 143/30 + 40
    assert "T 1343/30 " in capsys.readouterr().out


def test_costs_per_stage(capsys: Captured) -> None:
    arguments = ["simulate", "--schedule", "gpipe", "--ranks", "2", "--microbatches", "2"]
    assert main([*arguments, "--forward", "1,5", "--backward", "2,7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["T"] == 27


def test_more_stages_than_ranks(capsys: Captured) -> None:
    assert main([*USUAL, "--stages", "8", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["num_stages"], figures["num_ranks"], figures["T"]) == (8, 4, 66)


def test_picture(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*USUAL, "--backward", "1", "--picture"]) == 0
    wanted = one_f_one_b(4, 8).picture(Costs(1, 1), width=120)
    assert capsys.readouterr().out == wanted + "\n"


def test_a_schedule_from_a_file(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# by hand\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n")
    assert main(["simulate", "--schedule", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine: 2 stages on 2 ranks, 2 microbatches",
        "T 9   span 9   bubble 33.3%   peak 2 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "stageline: the following arguments are required: COMMAND"),
        (["dance"], "stageline: argument COMMAND: invalid choice: 'dance'"),
        (["simulate"], "stageline simulate: the following arguments are required: --schedule"),
        (["simulate", "--schedule", "1f1b"], "needs --ranks or --stages: add one"),
        (["simulate", "--schedule", "1f1b", "--ranks", "2"], "needs --microbatches: add it"),
        ([*USUAL, "--ranks", "x"], "argument --ranks: invalid int value: 'x'"),
        ([*USUAL, "--ranks", "0"], "num_stages=0"),
        ([*USUAL, "--stages", "3"], "num_stages=3 for num_ranks=4"),
        ([*USUAL, "--schedule", "gpip"], "Did you mean 'gpipe'?"),
        ([*USUAL, "--forward", "x"], "argument --forward: 'x' is not a number"),
        ([*USUAL, "--forward", "1/0"], "argument --forward: '1/0' is not a number"),
        ([*USUAL, "--forward", "1,2"], "forward is given for 2 stages, the schedule has 4"),
        ([*USUAL, "--backward=-1"], "costs: backward is -1: give zero or more"),
        ([*USUAL, "--json", "--picture"], "--json and --picture exclude each other"),
        (["simulate", "--schedule", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: Captured
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("stageline")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0 0X0", "line 1, column 5: '0X0' is not an action"),
        (b"0F0 0B0 0B0", "rank 0: 0B0 stands 2 times"),
        (b"", "the text holds no actions"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_a_wrong_file_is_one_line_and_status_2(
    content: bytes, message: str, capsys: Captured, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.txt"
    file.write_bytes(content)
    assert main(["simulate", "--schedule", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_file_and_numbers_that_contradict_it(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0B0")
    assert main(["simulate", "--schedule", str(file), "--ranks", "1"]) == 0
    assert main(["simulate", "--schedule", str(file), "--ranks", "3"]) == 2
    assert "has 1 for --ranks, not 3: leave it out" in capsys.readouterr().err


def test_help(capsys: Captured) -> None:
    assert main(["simulate", "--help"]) == 0
    assert "gpipe, 1f1b, sequential, forward-only" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("module", ["stageline", "stageline.cli"])
def test_python_dash_m(module: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["stageline", *USUAL])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(module, run_name="__main__")
    assert stop.value.code == 0
    assert "T 33 " in capsys.readouterr().out
