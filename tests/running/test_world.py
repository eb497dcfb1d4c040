"""The world of a job: a pipeline joins the store alone, and the script may make its own world."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stageline.running.slabs import can_share_memory
from tests.running.jobs import Job, free_port

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not can_share_memory(), reason="this system has no /dev/shm"),
]

PROGRAM = "tests.running.world_program"


def start(job: Job, *, with_torchrun: bool) -> None:
    if with_torchrun:  # the store is that of torchrun itself
        command = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", PROGRAM)
        job.start([sys.executable, "-m", *command, str(job.folder)], {})
        return
    port = str(free_port())  # rank 0 keeps the store, for pipelines and for torch
    for rank in ("0", "1"):
        world = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        job.start([sys.executable, "-m", PROGRAM, str(job.folder)], world)


@pytest.mark.parametrize("with_torchrun", [True, False])
def test_pipelines_before_within_and_after_a_world_of_the_scripts(
    with_torchrun: bool, tmp_path: Path
) -> None:
    """A pipeline used to make torch's world itself: the script could not make its own later.

    And gloo has a thread that wakes up a hundred times a second: a step of a ResNet took 1 % more.
    """
    with Job(tmp_path) as job:
        start(job, with_torchrun=with_torchrun)
        assert set(job.wait()) == {0}, job.printed()
        for rank in (0, 1):
            (before,) = job.reports(rank, "before")
            assert before == {"kind": "before", "equal": True, "has_world": False}
            assert job.reports(rank, "threads")[0]["gloo"] == []
            (within,) = job.reports(rank, "within")
            assert within == {"kind": "within", "equal": True, "sum": 2.0}
            (after,) = job.reports(rank, "after")
            assert after == {"kind": "after", "equal": True, "has_world": False}
