"""What README and the guide tell a reader to do can be done, exactly as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.people.commands import ROOT, run_python, run_torchrun
from tests.people.markdown import (
    Block,
    as_script,
    commands,
    make_targets,
    relative_links,
    running,
    shown_after,
)

pytestmark = pytest.mark.people

README = ROOT / "README.md"
SCRIPTS = running(README.read_text())  # each is a script of its own
SEQUELS = [  # pages whose blocks go on from one another
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "migrating").glob("*.md")),
    ROOT / "docs" / "understanding" / "schedules.md",
    ROOT / "docs" / "understanding" / "costs.md",
]
PAGES = [README, *SEQUELS]
MARK = "---- the next block of the page"
MADE = {target for target in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", SEQUELS, ids=page_name)
def test_the_code_of_a_page_runs_and_prints_what_is_shown(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(as_script(text, mark=MARK))
    _, *printed = run_python(script, cwd=tmp_path).split(f"{MARK}\n")
    for block, got in zip(running(text), printed, strict=True):
        shown = shown_after(text, block)
        if shown:
            assert comparable(got) == comparable(shown), f"line {block.first_line} of {page.name}"


def comparable(output: str) -> list[str]:
    """Return the lines of an output, with another name and line for the user's file."""
    lines = re.sub(r"\b\w+\.py:\d+", "model.py:1", output).strip("\n").splitlines()
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_the_make_targets_of_a_page_exist(page: Path) -> None:
    assert make_targets(page.read_text()) - MADE == set()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    linked = {page.parent / link for link in relative_links(text)}
    run = {ROOT / w for c in commands(text) for w in c.split() if w.startswith("examples/")}
    assert {page_name(path) for path in linked | run if not path.exists()} == set()


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: f"line {block.first_line}")
def test_a_block_of_readme_prints_the_same_under_python_and_torchrun(
    block: Block, tmp_path: Path
) -> None:
    """In 0.1 they drew a batch without a seed, so that each process had another one."""
    script = tmp_path / "train.py"
    script.write_text(block.code)
    in_threads = run_python(script, cwd=tmp_path)
    shown = shown_after(README.read_text(), block)
    if shown:
        assert comparable(in_threads) == comparable(shown)
    in_processes = run_torchrun(num_stages(block), script, only_rank=0)
    assert in_threads != ""
    assert without_place(in_processes) == without_place(in_threads)


def num_stages(block: Block) -> int:
    """Return how many stages a block of README makes: torchrun starts a process for each."""
    found = re.search(r"\b(?:split|num_stages)=(\d+)", block.code)
    assert found is not None, (
        f"line {block.first_line} of README: teach num_stages() how this block says their number"
    )
    return int(found[1])


def without_place(output: str) -> str:
    """Return an output without the words for where the ranks of a pipeline run."""
    return re.sub(r"\((threads|processes)\b[^)]*\)", "", output)


def test_readme_shows_code_that_runs() -> None:
    assert "import stageline" in as_script(README.read_text())
