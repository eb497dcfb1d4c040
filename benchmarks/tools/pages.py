"""What a run has measured, put into its README between two marks; and where it was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Example:
        >>> print(table(["m", "ms"], [["8", "1.5"]]))
        | m | ms |
        |---|---|
        | 8 | 1.5 |
    """
    lines = [head, ["---"] * len(head), *rows]
    bars = [f"| {' | '.join(line)} |" for line in lines]
    bars[1] = bars[1].replace(" ", "")
    return "\n".join(bars)


def write(readme: Path, section: str, text: str) -> None:
    """Replace a section of a page; all else on it stays.

    Raises:
        ValueError: The page has no such section, or has it twice.
    """
    begin, end = f"<!-- {section}: begin, written by run.py --write -->", f"<!-- {section}: end -->"
    page = readme.read_text()
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
        raise ValueError(f"{readme}: wanted the lines {begin!r} and {end!r}, once each")
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")


class Setting:
    """When and where a section was measured; made before it begins.

    Args:
        threads: Of what runs, in words.
    """

    def __init__(self, threads: str = "one intra-op thread per rank") -> None:
        self._threads = threads
        self._load = os.getloadavg()[0]

    def __str__(self) -> str:
        return (
            f"**Setting.** {date.today()}; torch {torch.__version__}, Python "
            f"{platform.python_version()}; {os.cpu_count()} cores of {processor()}, "
            f"{platform.system()}; {self._threads}; load {self._load:.1f} before "
            f"the run and {os.getloadavg()[0]:.1f} at its end, itself included."
        )


def processor() -> str:
    """Return what the processor calls itself."""
    try:
        described = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1] for line in described if line.startswith("model name")]
    return (
        " ".join(names[0].replace("(R)", "").replace("(TM)", "").split())
        if names
        else platform.machine()
    )
