"""Ranks that meet as threads of this process: the whole control plane, and no process to start."""

from __future__ import annotations

import errno
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # without being listed

from stageline.running.control import Member, job, leaving
from stageline.running.slabs import Slab
from stageline.running.transports.base import Endpoint
from stageline.running.transports.shared_memory import SharedMemoryTransport

Create = Callable[[int], tuple[Slab, int]]
Story = Callable[[int, Endpoint], Any]


@contextmanager
def members(monkeypatch: pytest.MonkeyPatch, num_ranks: int = 2) -> Iterator[list[Member]]:
    """Return the members of a job, joined and in their first call."""
    # All ranks build their first pipeline.
    monkeypatch.setattr(job, "_numbers", defaultdict(lambda: repeat(1)))
    monkeypatch.setattr(leaving, "remember", lambda member: None)  # hooks are for whole processes
    store = HashStore()

    def meet(rank: int) -> Member:
        return job.join(store, rank, num_ranks, timeout=20, heartbeat_timeout=20)

    joined = together(num_ranks, meet)
    for member in joined:
        member.next_call()
    try:
        yield joined
    finally:
        for member in joined:
            member.leave("the test is over")


def together(num_ranks: int, act: Callable[[int], Any], timeout: float = 60) -> list[Any]:
    """Call a function for every rank, each in a thread; return what they return."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        if errors:
            raise errors[0]
        for thread in threads:
            thread.join(0.01)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    return [results[rank] for rank in range(num_ranks)]


class SharedParty:
    """Ranks of this process that share memory."""

    def __init__(self, joined: list[Member]) -> None:
        self.members = joined
        self.transports = [SharedMemoryTransport(member) for member in joined]

    def run(self, story: Story, *, epoch: int = 0, window: int | None = None) -> list[Any]:
        """Let all ranks act, each at its endpoint."""

        def act(rank: int) -> Any:
            return story(rank, self.transports[rank].open(epoch=epoch, window=window))

        return together(len(self.members), act)

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


@contextmanager
def shared_party(monkeypatch: pytest.MonkeyPatch, num_ranks: int = 2) -> Iterator[SharedParty]:
    with members(monkeypatch, num_ranks) as joined:
        party = SharedParty(joined)
        yield party
        party.close()


class Memory:
    """Counts the slabs that are made, and has room for only so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.room: int | None = None
        real: Create = Slab.create

        def create(size: int) -> tuple[Slab, int]:
            if self.room is not None and len(self.made) >= self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.made.append(size)
            return real(size)

        monkeypatch.setattr(Slab, "create", create)
