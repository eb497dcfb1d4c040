"""What README and the guide tell a reader to do can be done, exactly as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.people.commands import ROOT, run_python
from tests.people.markdown import (
    as_script,
    commands,
    make_targets,
    relative_links,
    running,
    shown_after,
)

pytestmark = pytest.mark.people

README = ROOT / "README.md"
PAGES = [
    README,
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    ROOT / "docs" / "understanding" / "schedules.md",
    ROOT / "docs" / "understanding" / "costs.md",
]
MARK = "---- the next block of the page"
MADE = {target for target in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
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


def test_readme_shows_code_that_runs() -> None:
    assert "import stageline" in as_script(README.read_text())
