"""Several hosts: network namespaces joined by a cable where those may be made, else loopback.

    ┌─ namespace a ─────┐  veth   ┌─ namespace b ─────┐      each with a torchrun of its own
    │ rank 0  10.77.0.1 │─────────│ rank 1  10.77.0.2 │
    └───────────────────┘         └───────────────────┘

Without the right to make namespaces, two processes with different STAGELINE_HOST_KEY count as two
hosts, on two addresses of the loopback interface.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.running.jobs import PROGRAM, Job

pytestmark = pytest.mark.processes


def listens_only_at(job: Job, address: str) -> bool:
    """Whether the control plane has opened one port, on one interface, and closed it again."""
    (opened,) = job.reports(0, "door")[0]["opened"]
    return (
        opened.startswith(f"{address}:") and opened not in job.reports(0, "ready")[0]["listening"]
    )


# ---- two addresses of one host -------------------------------------------------------------------

LOOPBACK = [
    {"STAGELINE_HOST_KEY": "a", "STAGELINE_HOST": "127.0.0.2", "GLOO_SOCKET_IFNAME": "lo"},
    {"STAGELINE_HOST_KEY": "b", "GLOO_SOCKET_IFNAME": "lo"},
]


def test_two_hosts_on_loopback_train_over_gloo(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start_ranks(2, steps=6, env=LOOPBACK)
        assert job.wait() == [0, 0], job.printed()
        for rank in (0, 1):
            ready = job.reports(rank, "ready")[0]
            assert ready["transport"] == "ProcessGroupTransport"
            assert ready["mapped"] == []
            assert job.reports(rank, "trained")[0]["equal"] == 6
            assert job.reports(rank, "log") == []
        assert listens_only_at(job, "127.0.0.2")


def test_kill_9_on_one_host_reaches_the_other_with_its_cause(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start_ranks(2, steps=0, env=LOOPBACK)
        for rank in (0, 1):
            job.wait_for(rank, "ready")
        job.processes[1].send_signal(signal.SIGKILL)
        error = job.wait_for(0, "error")["text"]
        assert error.startswith("PeerError: rank 1 is gone: its process ended without a word")


@pytest.mark.slow
def test_shared_memory_cannot_be_forced_between_hosts(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start_ranks(2, steps=3, env=LOOPBACK, transport="shared-memory")
        for rank in (0, 1):
            error = job.wait_for(rank, "error")["text"]
            assert "transport='shared-memory': ranks run on several hosts" in error
        assert 0 not in job.wait()


@pytest.mark.slow
def test_an_address_of_another_host_is_an_error_everywhere(tmp_path: Path) -> None:
    """The store is in rank 0's process: it ended before the other rank had read what was wrong."""
    env = [{**one, "STAGELINE_HOST": "192.0.2.7"} for one in LOOPBACK]
    with Job(tmp_path) as job:
        job.start_ranks(2, steps=3, env=env)
        for rank in (0, 1):
            error = job.wait_for(rank, "error")["text"]
            assert error.startswith("PeerError: rank 0 cannot listen at 192.0.2.7 (")


# ---- two network namespaces ----------------------------------------------------------------------


class Place(NamedTuple):
    """A namespace as a host: its name, its address and the name of its interface."""

    namespace: str
    address: str
    interface: str


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def places() -> Iterator[tuple[Place, Place]]:
    """Make two namespaces and the cable between them, or skip with the reason."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux with iproute2")
    mark = f"{os.getpid() % 100_000}"
    two = (
        Place(f"stageline-a-{mark}", "10.77.0.1", f"sla{mark}"),
        Place(f"stageline-b-{mark}", "10.77.0.2", f"slb{mark}"),
    )
    try:
        for place in two:
            _ip("netns", "add", place.namespace)
        _ip("link", "add", two[0].interface, "type", "veth", "peer", "name", two[1].interface)
        for name, address, interface in two:
            _ip("link", "set", interface, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("netns", "exec", two[0].namespace, "true")
        yield two
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces here: {error.stderr.strip()}")
    finally:
        for place in two:  # its end of the cable goes with it
            subprocess.run(
                ["ip", "netns", "del", place.namespace], capture_output=True, check=False
            )


def start_torchrun(
    job: Job, places: tuple[Place, Place], steps: int, heartbeat_timeout: float = 30
) -> None:
    """Start one torchrun per host, as a user does on a cluster."""
    for number, place in enumerate(places):
        command = [
            *("ip", "netns", "exec", place.namespace, sys.executable),
            *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *(f"--node-rank={number}", f"--master-addr={places[0].address}"),
            *("--master-port=29511", "-m", PROGRAM, str(job.folder), str(steps)),
        ]
        env = {
            "GLOO_SOCKET_IFNAME": place.interface,
            "JOB_HEARTBEAT_TIMEOUT": str(heartbeat_timeout),
        }
        job.start(command, env)


def test_torchrun_on_two_hosts_trains_over_gloo(
    places: tuple[Place, Place], tmp_path: Path
) -> None:
    with Job(tmp_path) as job:
        start_torchrun(job, places, steps=6)
        assert job.wait() == [0, 0], job.printed()
        for rank in (0, 1):
            assert job.reports(rank, "ready")[0]["transport"] == "ProcessGroupTransport"
            assert job.reports(rank, "trained")[0]["equal"] == 6
            assert job.reports(rank, "log") == []
        assert listens_only_at(job, places[0].address)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_kill_9_on_one_of_two_torchrun_hosts_reaches_the_other(
    who: int, places: tuple[Place, Place], tmp_path: Path
) -> None:
    with Job(tmp_path) as job:
        start_torchrun(job, places, steps=0)
        pids = [job.wait_for(rank, "ready")["pid"] for rank in (0, 1)]
        os.kill(pids[who], signal.SIGKILL)
        error = job.wait_for(1 - who, "error")["text"]
        assert error.startswith(f"PeerError: rank {who} is gone: its process ended without a word")
        assert 0 not in job.wait()


@pytest.mark.slow
def test_a_cable_that_is_cut_is_noticed_as_silence(
    places: tuple[Place, Place], tmp_path: Path
) -> None:
    """Nothing ends a TCP connection whose other side cannot be reached; the heartbeats do."""
    with Job(tmp_path) as job:
        start_torchrun(job, places, steps=0, heartbeat_timeout=5)
        for rank in (0, 1):
            job.wait_for(rank, "ready")
        _ip("-n", places[1].namespace, "link", "set", places[1].interface, "down")
        errors = [job.wait_for(rank, "error")["text"] for rank in (0, 1)]
        assert errors[0].startswith("PeerError: rank 1 is silent: no sign of life for ")
        assert errors[1].startswith("PeerError: rank 0 is silent: no sign of life for ")
