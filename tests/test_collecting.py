"""Importing stageline leaves the garbage collector as it was."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_the_collector_is_left_as_it_was(before: str) -> None:
    script = f"import gc; gc.{before}(); import stageline; print(gc.isenabled())"
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.strip() == str(before == "enable")
