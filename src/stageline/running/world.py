"""Is this process alone, or one of many that torchrun started?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from stageline.errors import PeerError
from stageline.torch_private import Store, default_store


@dataclass(frozen=True)
class World:
    """This process's place among the processes of the job."""

    rank: int
    size: int

    @classmethod
    def find(cls) -> World | None:
        """Return the world that torchrun or the script made; None for a process alone."""
        if not dist.is_available():
            return None
        if dist.is_initialized():
            world = cls(dist.get_rank(), dist.get_world_size())
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            world = cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        else:
            return None
        return world if world.size > 1 else None

    def store(self, timeout: float) -> Store:
        """Return the store of the job: that of the script's own world, where it has made one.

        Otherwise the store is joined and no world made: that would bring a thread of gloo's which
        wakes up a hundred times a second for nothing, and keep the script from making its own.
        """
        if dist.is_initialized():
            return default_store()
        if self not in _stores:
            try:
                _stores[self] = _environment_store(timedelta(seconds=timeout))
            except (dist.DistError, RuntimeError, ValueError) as cause:
                raise PeerError(
                    f"rank {self.rank} did not meet the {self.size} processes of the job within "
                    f"{timeout:g} s ({str(cause).splitlines()[0]}): a process has not started, has "
                    "failed before, or cannot reach MASTER_ADDR and MASTER_PORT"
                ) from cause
        return _stores[self]


_stores: dict[World, Store] = {}  # kept for as long as this process lives: others use them


def _environment_store(timeout: timedelta) -> Store:
    """Join the store that the environment names; return when all processes of the job are there."""
    store: Store
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set(f"stageline/here/{rank}", "")
    store.wait([f"stageline/here/{each}" for each in range(size)], timeout)
    return store
