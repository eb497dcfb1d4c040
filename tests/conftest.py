"""Sorts the tests into four rings and prints how long each took.

    1 rows        pure Python, exact figures: schedules, plans, doctests
    2 threads     whole pipelines in one process
    3 processes   tests marked `processes`
    4 people      tests marked `people`: README, examples

A ring is also a marker, so `pytest -m rows` runs the innermost one. `make test` lets two workers
share the tests; each of the two outer rings stays with one of them, because its tests share
processes, and because they would be in each other's way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Some virtual machines advertise AMX and trap when a bfloat16 kernel uses it. oneDNN reads this
# when torch is first used, here and in every process that a test starts.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Stages of tests are small, and would be left whole where a schedule splits their backward.
os.environ.setdefault("STAGELINE_SPLIT_ALL", "1")

from tests.fixtures import four_ranks, one_thread, two_ranks  # noqa: F401  # used by name

# A deadline in seconds fails on a busy machine and says nothing about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

RINGS = ("rows", "threads", "processes", "people")

TOGETHER = ("processes", "people")

TESTS = Path(__file__).parent

# What never runs a pipeline. All other tests are `threads` unless they carry a ring's marker.
PURE = {
    "scheduling",
    "partitioning",
    "planning",
    "cli",
    "people",  # but for the marked ones
    "test_conftest.py",
    "test_errors.py",
    "test_layers.py",
    "test_log.py",
    "test_public_api.py",
}


def ring_of(item: pytest.Item) -> str:
    """Return the ring of a test: its marker, else where it lies."""
    for ring in reversed(RINGS):
        if item.get_closest_marker(ring):
            return ring
    if isinstance(item, pytest.DoctestItem) or not item.path.is_relative_to(TESTS):
        return "rows"
    return "rows" if item.path.relative_to(TESTS).parts[0] in PURE else "threads"


class RingClock:
    """Adds up the tests and their seconds, setup and teardown included, ring by ring."""

    def __init__(self) -> None:
        self.tests = dict.fromkeys(RINGS, 0)
        self.seconds = dict.fromkeys(RINGS, 0.0)

    # Before pytest's own hook, which drops the tests that `-m` does not select.
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            ring = ring_of(item)
            item.add_marker(ring)
            if ring in TOGETHER:
                item.add_marker(pytest.mark.xdist_group(ring))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ring = next(ring for ring in reversed(RINGS) if ring in report.keywords)
        self.seconds[ring] += report.duration
        self.tests[ring] += report.when == "setup"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time per ring")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> Iterator[str]:
        for number, ring in enumerate(RINGS, start=1):
            yield f"{number} {ring:<10} {self.tests[ring]:>5} tests {self.seconds[ring]:>8.1f} s"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RingClock(), "ring-clock")
