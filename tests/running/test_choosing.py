"""What carries the packets of ranks in several processes: chosen, forced, or too small."""

from __future__ import annotations

import logging

import pytest
import torch

import stageline as sl
from stageline.errors import ConfigError
from stageline.running.building import Builders
from stageline.running.control import Member
from stageline.running.slabs import can_share_memory
from stageline.running.transports.base import ProcessTransport
from stageline.running.transports.process_group import ProcessGroupTransport
from stageline.running.transports.shared_memory import SharedMemoryTransport
from tests.running.party import Memory, members, together

pytestmark = pytest.mark.skipif(not can_share_memory(), reason="this system has no /dev/shm")


def agree(joined: list[Member], transport: str | None) -> list[ProcessTransport]:
    """Let two ranks choose what carries their packets, as they do when they build a pipeline."""

    def act(rank: int) -> ProcessTransport:
        return Builders(joined[rank]).agree({}, draws=False, transport=transport, placement=(0, 1))

    return together(2, act)


@pytest.mark.parametrize("transport", [None, "shared-memory"])
@pytest.mark.parametrize("room", [0, 1])
def test_too_little_memory_for_the_channels_means_gloo_and_one_line(
    room: int,
    transport: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Memory(monkeypatch).room = room
    with members(monkeypatch) as joined, caplog.at_level(logging.WARNING, "stageline"):
        for carrier in agree(joined, transport):
            assert isinstance(carrier, ProcessGroupTransport)
            carrier.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("rank 0: shared memory is too small (rank ")
    assert line.endswith("No space left on device): using gloo instead")


def test_memory_for_sending_outputs_is_there_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The channel from the last rank to the first was made when outputs were first sent there.

    By then all memory could be in use, and a pipeline that had chosen shared memory failed.
    """
    memory = Memory(monkeypatch)
    with members(monkeypatch, 3) as joined:
        carriers = together(
            3,
            lambda r: Builders(joined[r]).agree(
                {}, draws=False, transport=None, placement=(0, 1, 2)
            ),
        )
        assert len(memory.made) == 2 + 2 + 1  # there, back, and from the last to the first
        for carrier in carriers:
            carrier.close()


@pytest.mark.parametrize(
    ("transport", "used"),
    [
        (None, SharedMemoryTransport),
        ("shared-memory", SharedMemoryTransport),
        ("process-group", ProcessGroupTransport),
    ],
)
def test_on_one_host_it_is_chosen_unless_another_one_is_named(
    transport: str | None, used: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    with members(monkeypatch) as joined:
        for carrier in agree(joined, transport):
            assert isinstance(carrier, used)
            carrier.close()


def test_on_several_hosts_it_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with members(monkeypatch) as joined:
        for member in joined:
            member.one_host = False
        with pytest.raises(ConfigError, match="transport='shared-memory': ranks run on several"):
            agree(joined, "shared-memory")


def test_alone_in_a_process_it_cannot_be_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"transport='shared-memory': this process is alone: start"
    ):
        sl.Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), split=1, transport="shared-memory")
