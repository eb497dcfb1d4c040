"""``stageline simulate``: figures as text and JSON, and one clear line for wrong input."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from stageline.cli import main
from stageline.scheduling import simulate
from stageline.scheduling.schedules import one_f_one_b

USUAL = ["simulate", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "8"]

Captured = pytest.CaptureFixture[str]


def test_a_time_line_and_a_table(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*USUAL, "--activation-bytes", "10"]) == 0
    drawn, table, figures = capsys.readouterr().out.split("\n\n")
    assert drawn == one_f_one_b(4, 8).picture(width=120)
    assert table.splitlines() == [
        "rank  busy  idle  wait  peak activations  peak bytes",
        "   0    24     9     9                 4          40",
        "   1    24     9     6                 3          30",
        "   2    24     9     3                 2          20",
        "   3    24     9     0                 1          10",
    ]
    assert figures == "makespan 33, bubble 27.27%\nspan 33, bubble 27.27%\n"


def test_of_a_long_schedule_there_is_no_time_line(capsys: Captured) -> None:
    assert main(["simulate", "--schedule", "1f1b", "--ranks", "2", "--microbatches", "6000"]) == 0
    assert "│" not in capsys.readouterr().out


def test_json(capsys: Captured) -> None:
    assert main([*USUAL, "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == {
        "schedule": "1f1b",
        "ranks": 4,
        "stages": 4,
        "microbatches": 8,
        "makespan": 33,
        "span": 33,
        "bubble": pytest.approx(9 / 33),
        "span_bubble": pytest.approx(9 / 33),
        "peak_activations": [4, 3, 2, 1],
        "busy": [24, 24, 24, 24],
        "idle": [9, 9, 9, 9],
        "wait": [9, 6, 3, 0],
    }
    assert '"makespan": 33,' in out, "an integer stays an integer"


def test_every_cost_is_an_option(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0R0 0I0 0W0 \n 1F0 1R0 1I0 1W0")
    times = ["--forward", "1,2", "--input-grad", "4", "--weight-grad", "8", "--recompute", "16"]
    hops = ["--latency", "32", "--bandwidth", "2", "--edge-bytes", "128"]
    sizes = ["--activation-bytes", "9,7", "--input-bytes", "5", "--freed-bytes", "6"]
    assert main(["simulate", "--schedule", str(file), "--json", *times, *hops, *sizes]) == 0
    figures = json.loads(capsys.readouterr().out)
    # 0F0, hop, 1F0 1R0 1I0, hop, 0I0 0W0
    assert figures["makespan"] == 1 + 96 + (2 + 16 + 4) + 96 + (4 + 8)
    assert figures["peak_bytes"] == [9, 7]


def test_a_figure_of_the_zero_bubble_paper(capsys: Captured) -> None:
    usual = ["simulate", "--schedule", "1f1b", "--ranks", "8", "--microbatches", "24", "--json"]
    costs = ["--forward", "18522", "--input-grad", "18086", "--weight-grad", "9337"]
    assert main([*usual, *costs, "--latency", "601"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["makespan"] == 1456749
    assert round(figures["bubble"], 4) == 0.2431


def test_stages_per_rank(capsys: Captured) -> None:
    assert main([*USUAL, "--stages-per-rank", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["stages"], figures["makespan"]) == (8, 66)
    assert figures["peak_activations"] == [4, 3, 2, 1], "each of two stages counts one half"
    assert main([*USUAL, "--stages", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_activations"][0] == pytest.approx(8 * 4 / 6)


@pytest.mark.parametrize(
    ("limit", "status", "line"),
    [
        ("4", 0, "1f1b fits: at most 4 of 4 activations"),
        ("7/2", 1, "1f1b does not fit: rank 0 holds 4 activations, the limit is 3.5"),
    ],
)
def test_a_memory_limit(limit: str, status: int, line: str, capsys: Captured) -> None:
    assert main([*USUAL, "--memory-limit", limit]) == status
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert main([*USUAL, "--memory-limit", limit, "--json"]) == status
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"] is (status == 0)
    assert figures["memory_limit"] == {"4": 4, "7/2": 3.5}[limit]


def test_a_picture_in_a_file(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "line.svg"
    assert main([*USUAL, "--svg", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 33
    assert file.read_text(encoding="utf-8") == simulate(one_f_one_b(4, 8)).svg()


def test_costs_are_exact(capsys: Captured) -> None:
    assert main([*USUAL, "--forward", "1/3", "--backward", "0.1", "--latency", "2.5"]) == 0
    # (8 + 4 - 1) * (1/3 + 1/10) + 2 * 5/2 * ((4 - 1) + (8 - 1) - ceil(7 / 4)) = 143/30 + 40
    assert "T 1343/30 " in capsys.readouterr().out


def test_costs_per_stage(capsys: Captured) -> None:
    arguments = ["simulate", "--schedule", "gpipe", "--ranks", "2", "--microbatches", "2"]
    assert main([*arguments, "--forward", "1,5", "--backward", "2,7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 27


def test_more_stages_than_ranks(capsys: Captured) -> None:
    assert main([*USUAL, "--stages", "8", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["stages"], figures["ranks"], figures["makespan"]) == (8, 4, 66)


def test_a_schedule_from_a_file(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# by hand\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n")
    assert main(["simulate", "--schedule", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine: 2 stages on 2 ranks, 2 microbatches"
    assert "T 9   span 9   bubble 33.3%   peak 2 1" in lines


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
        ([*USUAL, "--input-grad", "3"], "of the two halves of the backward one is given"),
        ([*USUAL, "--latency", "1,2"], "latency is given for 2 cuts, the schedule has 3"),
        ([*USUAL, "--bandwidth", "0"], "bandwidth is 0: give more"),
        ([*USUAL, "--stages-per-rank", "0"], "--stages-per-rank is 0: a rank holds at least one"),
        ([*USUAL, "--stages-per-rank", "2", "--stages", "9"], "--stages 9 is not --ranks 4 times"),
        (
            ["simulate", "--schedule", "1f1b", "--stages-per-rank", "2", "--microbatches", "2"],
            "--stages-per-rank needs --ranks: add it",
        ),
        ([*USUAL, "--memory-limit", "much"], "argument --memory-limit: 'much' is not a number"),
        ([*USUAL, "--svg", "/nowhere/at/all.svg"], "No such file or directory"),
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
    usual = ["simulate", "--schedule", str(file)]
    assert main([*usual, "--ranks", "1", "--stages-per-rank", "1"]) == 0
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


AUTO = ["simulate", "--schedule", "auto", "--ranks", "4", "--microbatches", "8"]


def test_a_search_fits_and_says_how_good_it_is(capsys: Captured) -> None:
    unit = ["--forward", "1", "--input-grad", "1", "--weight-grad", "1"]
    assert main([*AUTO, *unit, "--metric", "span", "--memory-limit", "6", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["schedule"], figures["source"], figures["metric"]) == ("auto", "search", "span")
    assert (figures["makespan"], figures["span"], figures["lower_bound"]) == (27, 25, 25)
    assert figures["gap"] == 0
    assert max(figures["peak_activations"]) <= 6
    assert figures["fits"] is True
    reached = {each["schedule"]: each["span"] for each in figures["candidates"]}
    assert (reached["zb-h1"], reached["zb-h2"]) == (27, 24)


def test_a_search_as_text(capsys: Captured) -> None:
    arguments = ["--memory-limit", "4", "--forward", "2,1,1,2", "--latency", "1"]
    assert main([*AUTO, *arguments]) == 0
    *_, verdict, fit = capsys.readouterr().out.splitlines()
    assert verdict.startswith("auto from ")
    assert fit == "auto fits: at most 4 of 4 activations"


def test_a_search_on_two_stages_per_rank(capsys: Captured) -> None:
    more = ["--stages-per-rank", "2", "--placement", "v", "--effort", "0.05", "--json"]
    assert main([*AUTO, *more, "--activation-bytes", "3", "--memory-limit-bytes", "24"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["stages"] == 8
    assert max(figures["peak_bytes"]) <= 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (AUTO[:-2], "schedule 'auto' needs --microbatches: add it"),
        (AUTO[:3] + AUTO[5:], "schedule 'auto' needs --ranks: add it"),
        ([*AUTO, "--memory-limit", "1/2"], "no schedule fits into the memory"),
    ],
)
def test_a_search_for_nothing(capsys: Captured, arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.people
def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    """``stageline simulate ... | head -1`` ended with "Broken pipe"."""
    sizes = ["--ranks", "32", "--microbatches", "250"]
    command = [sys.executable, "-m", "stageline", "simulate", "--schedule", "1f1b", *sizes]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("1f1b: 32 stages")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
