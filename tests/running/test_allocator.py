"""Freed memory stays with the process, unless the user has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stageline.running import allocator

PROGRAM = """
import resource, torch
from stageline.running.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        tensors = [torch.ones(2**20) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults(), keep_freed_memory(), (faults(), faults())[1])
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is asked, elsewhere nobody is")
def test_what_is_freed_is_not_taken_from_the_system_again() -> None:
    said = {allocator.VARIABLE, allocator.TUNABLES, *allocator.CHOSEN_BY_USER}
    environment = {name: value for name, value in os.environ.items() if name not in said}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    before, told, after = done.stdout.split()
    assert told == "True"
    # 32 MiB are 8,192 pages, 20 times. How many of them glibc gives back by itself is not sure: it
    # keeps all of them if something small happens to lie above them.
    assert int(after) < 20 * 8_192 / 20, f"{before} faults before glibc was told"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (allocator.VARIABLE, "0"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        (allocator.TUNABLES, "glibc.malloc.tcache_count=0:glibc.malloc.top_pad=65536"),
    ],
)
def test_who_has_chosen_otherwise_is_left_alone(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert allocator.keep_freed_memory.__wrapped__() is False


def test_other_settings_of_glibc_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever turned the cache of each thread off had freed memory given back as well."""
    for name in (allocator.VARIABLE, *allocator.CHOSEN_BY_USER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(allocator.TUNABLES, "glibc.malloc.tcache_count=0")
    assert not allocator._is_chosen_by_user()
