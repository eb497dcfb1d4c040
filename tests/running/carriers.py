"""Transports between the processes of a test, set up as a pipeline does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from stageline.running.control import Member, join
from stageline.running.transports.base import ProcessTransport
from stageline.running.transports.process_group import ProcessGroupTransport
from stageline.running.transports.shared_memory import SharedMemoryTransport
from stageline.torch_private import default_store

CARRIERS: dict[str, type[SharedMemoryTransport] | type[ProcessGroupTransport]] = {
    "shared-memory": SharedMemoryTransport,
    "process-group": ProcessGroupTransport,
}


@contextmanager
def member_of_the_job(heartbeat_timeout: float = 5.0) -> Iterator[Member]:
    """Join the processes of the pool, and leave together with them."""
    member = join(
        default_store(),
        dist.get_rank(),
        dist.get_world_size(),
        timeout=20,
        heartbeat_timeout=heartbeat_timeout,
    )
    member.next_call()
    try:
        yield member
        if member.failure is None:
            member.begin({})
            member.finish()
    finally:
        member.leave("the test is over")


@contextmanager
def carrier(name: str) -> Iterator[ProcessTransport]:
    """Return a transport of the processes of the pool."""
    with member_of_the_job() as member:
        transport = CARRIERS[name](member)
        member.on_failure = transport.abort
        try:
            yield transport
        finally:
            if member.failure is None:
                member.begin({})
                member.finish()
                member.next_call()
            transport.close()
