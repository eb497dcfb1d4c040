"""Whole jobs with shared memory: chosen, forced, too small, and nothing left after any end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from stageline.running.slabs import can_share_memory
from tests.running.jobs import Job

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not can_share_memory(), reason="this system has no /dev/shm"),
]


def left_behind() -> set[str]:
    """Return what a rank could have left in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if "stageline" in name or name.startswith("#")}


def test_shared_memory_is_chosen_and_nothing_of_it_has_a_name(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start_ranks(2, steps=6)
        for rank in (0, 1):
            ready = job.wait_for(rank, "ready")
            assert ready["transport"] == "SharedMemoryTransport"
            assert ready["mapped"]
            assert all(name.endswith("(deleted)") for name in ready["mapped"]), ready["mapped"]
            assert not [name for name in ready["listening"] if name.startswith("unix:")]
        assert job.wait() == [0, 0], job.printed()
        for rank in (0, 1):
            assert job.reports(rank, "trained") == [{"kind": "trained", "equal": 6, "steps": 6}]
            assert job.reports(rank, "log") == []
        (opened,) = job.reports(0, "door")[0]["opened"]
        assert opened.startswith("unix:@stageline-")
    assert left_behind() == set()


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_kill_9_of_one_rank_ends_the_other_with_the_cause_and_leaves_nothing(
    who: int, tmp_path: Path
) -> None:
    with Job(tmp_path) as job:
        job.start_ranks(2, steps=0)
        for rank in (0, 1):
            job.wait_for(rank, "ready")
        job.processes[who].send_signal(signal.SIGKILL)
        error = job.wait_for(1 - who, "error")["text"]
        assert error.startswith(f"PeerError: rank {who} is gone: its process ended without a word")
        job.wait()
    assert left_behind() == set()


def test_kill_9_of_all_ranks_leaves_nothing(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start_ranks(2, steps=0)
        for rank in (0, 1):
            job.wait_for(rank, "ready")
        for process in job.processes:
            process.send_signal(signal.SIGKILL)
        assert job.wait() == [-signal.SIGKILL] * 2
    assert left_behind() == set()


@pytest.mark.slow
def test_process_group_can_be_forced(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start_ranks(2, steps=4, transport="process-group")
        assert job.wait() == [0, 0], job.printed()
        for rank in (0, 1):
            assert job.reports(rank, "ready")[0]["transport"] == "ProcessGroupTransport"
            assert len(job.reports(rank, "ready")[0]["mapped"]) == 1  # where ranks agree on steps
            assert job.reports(rank, "trained")[0]["equal"] == 4


# ---- a /dev/shm of the job's own -----------------------------------------------------------------


@cache
def why_no_small_memory() -> str | None:
    """Return why a job cannot have a /dev/shm of its own here; None if it can."""
    if sys.platform != "linux":
        return "needs Linux"
    try:
        subprocess.run(_with_memory("64k", "true"), check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"may not mount a small /dev/shm ({error})"
    return None


def _with_memory(size: str, command: str) -> list[str]:
    mount = f"mount -t tmpfs -o size={size},mode=1777 tmpfs /dev/shm"
    return ["unshare", "--mount", "sh", "-c", f"{mount} && {command}"]


def run_with_memory(size: str, job: Job, steps: int, transport: str | None) -> None:
    """Run two ranks below one shell whose /dev/shm is so large; nothing of it is in use after."""
    script = f"""
import sys; sys.path[:0] = ['src', '.']
import os
from pathlib import Path
from tests.running.jobs import Job
with Job(Path({str(job.folder)!r})) as job:
    job.start_ranks(2, {steps}, transport={transport!r})
    codes = job.wait()
    if codes != [0, 0]:
        sys.exit(job.printed())
space = os.statvfs("/dev/shm")
print("left", os.listdir("/dev/shm"), space.f_blocks - space.f_bfree)
"""
    path = job.folder / "script.py"
    path.write_text(script)
    done = subprocess.run(
        _with_memory(size, f"exec {sys.executable} {path}"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "left [] 0" in done.stdout


@pytest.mark.parametrize(
    ("size", "transport", "used"),
    [
        ("64k", None, "ProcessGroupTransport"),
        pytest.param("64k", "shared-memory", "ProcessGroupTransport", marks=pytest.mark.slow),
        pytest.param("192k", None, "SharedMemoryTransport", marks=pytest.mark.slow),
    ],
)
def test_a_memory_that_is_too_small_means_gloo_and_one_line(
    size: str, transport: str | None, used: str, tmp_path: Path
) -> None:
    """192 KiB hold the first slab of both channels, in which packets then take turns."""
    reason = why_no_small_memory()
    if reason is not None:
        pytest.skip(reason)
    job = Job(tmp_path)
    run_with_memory(size, job, 5, transport)
    told = []
    for rank in (0, 1):
        assert job.reports(rank, "ready")[0]["transport"] == used
        assert job.reports(rank, "trained")[0]["equal"] == 5
        told += [one["text"] for one in job.reports(rank, "log")]
    if used == "ProcessGroupTransport":
        (line,) = told
        assert line.startswith("rank 0: shared memory is too small (rank ")
        assert line.endswith("No space left on device): using gloo instead")
