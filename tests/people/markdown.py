"""Reads the parts of a page that a person would copy: code, commands, links."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

NO_RUN = "<!-- no-run -->"
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+) *(?P<language>\w*)")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    first_line: int  # of its code, counted from 1
    code: str
    runs: bool


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page; one that stands after `<!-- no-run -->` does not run."""
    lines = page.splitlines()
    opening: re.Match[str] | None = None
    start = 0
    for number, line in enumerate(lines):
        found = FENCE.match(line)
        if opening is None:
            opening, start = found, number + 1
        elif found and found["ticks"] == opening["ticks"] and not found["language"]:
            code = textwrap.dedent("\n".join(lines[start:number]))
            runs = not preceded_by(NO_RUN, lines[: start - 1])
            yield Block(opening["language"], start + 1, code, runs)
            opening = None


def preceded_by(mark: str, lines: list[str]) -> bool:
    """Tell whether the last line that is not empty is the mark."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "") == mark


def running(page: str) -> list[Block]:
    """Return the blocks of a page that are Python and run."""
    return [block for block in blocks(page) if block.language == "python" and block.runs]


def as_script(page: str, *, mark: str | None = None) -> str:
    """Return the Python code of a page as one script, each line where it stands in the page.

    A traceback then names the line of the page. Before each block a mark is printed, if there is
    one, so that one can tell what a block has printed.

    >>> as_script("# Title\\n```python\\nx = 1\\n```\\ntext\\n```python\\nprint(x)\\n```\\n")
    '\\n\\nx = 1\\n\\n\\n\\nprint(x)\\n'
    """
    script: list[str] = []
    for block in running(page):
        script += [""] * (block.first_line - 1 - len(script))
        if mark is not None:
            script[-1] = f"print({mark!r})"  # in place of the fence
        script += block.code.split("\n")
    return "\n".join(script) + "\n"


def shown_after(page: str, block: Block) -> str:
    """Return the indented lines that follow a block, which show what it prints; "" for none.

    >>> page = "```python\\nprint(1)\\n```\\n\\n    1\\n\\nNext\\n"
    >>> shown_after(page, running(page)[0])
    '1'
    """
    rest = page.splitlines()[block.first_line + block.code.count("\n") + 1 :]
    shown = itertools.takewhile(lambda line: not line or line.startswith("    "), rest)
    return textwrap.dedent("\n".join(shown)).strip("\n")


def commands(page: str) -> Iterator[str]:
    """Yield what a page tells to type: lines of blocks that are no Python, and inline code."""
    for block in blocks(page):
        if block.language != "python":
            for line in block.code.splitlines():
                yield line.strip().removeprefix("$ ")
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page):
        yield code.strip()


def make_targets(page: str) -> set[str]:
    """Return the targets of the `make` commands of a page.

    >>> sorted(make_targets("Please make sure: `make demo`, then\\n```\\n$ make test lint\\n```"))
    ['demo', 'lint', 'test']
    """
    words = (command.split("#")[0].split() for command in commands(page))
    return {
        target
        for command in words
        if command[:1] == ["make"]
        for target in command[1:]
        if re.fullmatch(r"[a-z][a-z-]*", target)
    }


def relative_links(page: str) -> set[str]:
    """Return the files that a page links to beside itself.

    >>> sorted(relative_links("[a](docs/a.md#part) [b](https://b.org) [c](#here) ![d](d.svg)"))
    ['d.svg', 'docs/a.md']
    """
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    return {t.split("#")[0] for t in targets if not re.match(r"[a-z]+:|#|/", t)}
