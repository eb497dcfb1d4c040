"""The world of a job: a pipeline joins the store alone, and the script may make its own world."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # without being listed

from stageline.errors import PeerError
from stageline.running import world
from stageline.running.settings import Settings
from stageline.running.slabs import can_share_memory
from stageline.running.world import World
from stageline.torch_private import Store
from tests.running.jobs import Job, free_port

needs_shared_memory = pytest.mark.skipif(
    not can_share_memory(), reason="this system has no /dev/shm"
)

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


@pytest.mark.processes
@needs_shared_memory
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


@pytest.mark.processes
@needs_shared_memory
def test_a_job_that_torchrun_starts_again(tmp_path: Path) -> None:
    """torchrun kept its store: rank 1 went to the address of a rank 0 that had ended."""
    command = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
    with Job(tmp_path) as job:
        program = ("-m", "tests.running.restarted_program", str(job.folder))
        job.start([sys.executable, "-m", *command, *program], {})
        assert set(job.wait()) == {0}, job.printed()
        for rank in (0, 1):
            equal = [report["equal"] for report in job.reports(rank, "trained")]
            assert equal == [True] * 4


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store that the environment names, for all threads."""
    made = HashStore()
    monkeypatch.setattr(world, "rendezvous", lambda *_, **__: iter([(made, -1, -1)]))
    monkeypatch.setattr(world, "_stores", {})
    return made


def test_what_was_left_in_a_store_is_neither_seen_nor_answered_for(store: Store) -> None:
    """Rank 0 hears of a rank 1 that has ended before the new one says its name."""
    parts: dict[int, Store] = {}

    def meet(rank: int) -> None:
        parts[rank] = World(rank, 2).store(20)
        parts[rank].set(f"from {rank}", str(rank))

    for attempt in range(3):
        world._stores.clear()
        first = threading.Thread(target=meet, args=[0])
        first.start()
        time.sleep(0.05)  # it has seen what was left by now, and goes on looking
        assert first.is_alive()
        meet(1)
        first.join()
        assert parts[0].get("from 1") == b"1"
        assert not parts[1].check(["left"])
        parts[1].set("left", str(attempt))


def test_a_rank_that_does_not_come_is_named(store: Store) -> None:
    with pytest.raises(PeerError, match=r"rank 0 did not meet .*\(rank 1 has not come\)"):
        World(0, 2).store(0.05)


def test_a_process_says_that_it_waits_for_others_to_build(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was silent for up to half an hour, while another process built something else."""
    monkeypatch.setattr(world, "_FIRST_NOTE", 0.01)
    with pytest.raises(PeerError, match="rank 1 did not meet the 2 processes"):
        Settings(timeout=0.2).join(World(1, 2))
    (line,) = caplog.messages
    assert line.startswith("rank 1: waits for all 2 processes to build this pipeline, 0.01 s so")


def test_a_rank_that_is_not_answered_gives_up(store: Store) -> None:
    with pytest.raises(PeerError, match="rank 1 did not meet the 2 processes"):
        World(1, 2).store(0.05)
