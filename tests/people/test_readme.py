"""What README and the guide tell a reader to do can be done, exactly as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.people.commands import ROOT, run_python
from tests.people.markdown import as_script, commands, make_targets, relative_links

pytestmark = pytest.mark.people

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs" / "guide").glob("*.md"))]
MADE = {target for target in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_the_code_of_a_page_runs_as_written(page: Path, tmp_path: Path) -> None:
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(as_script(page.read_text()))
    run_python(script, cwd=tmp_path)


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
