"""``stageline plan``: proposals as text and JSON, and one clear line for what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import stageline as sl
from stageline.cli import main
from tests.people.commands import run_command

MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, scale=1):
        for layer in self.layers:
            x = layer(x).relu() * scale
        return x

def build():
    with torch.device("meta"):
        return Model(), (torch.randn(2, 64),)

def with_keywords():
    return *build(), {"scale": 2}

def wrong():
    return [1, 2]

def wrong_parts():
    return 1, 2, 3

number = 3
"""

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"model_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def plan(here: Path, function: str, *words: str) -> int:
    return main(["plan", f"model_of_{here.name}:{function}", *words])


USUAL = ["--ranks", "2", "--batch-size", "8", "--device", "A100", "--schedules", "1f1b,gpipe"]


def test_a_table_and_a_file(here: Path, capsys: Captured) -> None:
    assert plan(here, "build", *USUAL, "--memory", "1MiB", "--save", "best.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("schedule", "ranks", "blocks", "m", "rows", "step", "ms"),
        *("bubble", "memory", "per", "rank"),
    ]
    assert "1.0 MiB per rank; costs: estimated for A100 80GB" in lines[-1]
    saved = sl.Proposal.from_json((here / "best.json").read_text())
    assert saved.method.schedule == lines[1].split()[1]


def test_json(here: Path, capsys: Captured) -> None:
    assert plan(here, "with_keywords", *USUAL, "--json", "--top", "1", "--microbatches", "4") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["num_ranks"], entry["num_microbatches"]) == (2, 4)
    assert entry["plan"]["format"] == "stageline plan"


def test_nothing_fits(here: Path, capsys: Captured) -> None:
    assert plan(here, "build", *USUAL, "--memory", "1KiB") == 1
    assert capsys.readouterr().out.startswith("Nothing fits: ")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_colon", "wanted MODULE:FUNCTION"),
        ("train.py:build", "wanted MODULE:FUNCTION"),
        ("no_such_module:build", "there is no module 'no_such_module' here"),
        ("{here}:nobody", "it has no function 'nobody' in"),
        ("{here}:number", "wanted a function, got 'number' in"),
        ("{here}:wrong", "must return (model, example_args)"),
        ("{here}:wrong_parts", "the first is a module, got int"),
    ],
)
def test_what_is_no_model(here: Path, model: str, message: str, capsys: Captured) -> None:
    named = model.replace("{here}", f"model_of_{here.name}")
    assert main(["plan", named, "--ranks", "2"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"stageline: the model {named!r} is not possible:")


def test_a_module_that_imports_what_is_not_there_says_so(here: Path) -> None:
    (here / "half.py").write_text("import not_installed_anywhere")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        main(["plan", "half:build", "--ranks", "2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "ranks=0: wanted a whole number of at least 1"),
        (["--ranks", "2", "--memory", "lots"], "memory_limit='lots': wanted bytes"),
        (["--ranks", "2", "--data-parallel", "some"], "'some': write a number, or auto"),
        (["--ranks", "2", "--microbatches", "a"], "'a': write numbers, such as 8,16"),
        (["--ranks", "2", "--device", "A1000"], "Did you mean 'A100'?"),
        (["--ranks", "4", "--data-parallel", "3"], "it does not divide ranks=4"),
    ],
)
def test_wrong_words(here: Path, words: list[str], message: str, capsys: Captured) -> None:
    assert plan(here, "build", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.people
def test_as_a_person_types_it(here: Path) -> None:
    printed = run_command(
        *(sys.executable, "-W", "error", "-m", "stageline"),
        *("plan", f"model_of_{here.name}:build", "--ranks", "2", "--memory", "16GiB"),
        *("--device", "A100"),
        cwd=here,
    )
    assert printed.splitlines()[1].startswith("1  ")
