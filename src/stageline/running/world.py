"""Is this process alone, or one of many that torchrun started?"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


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

    def new_group(self, timeout: float) -> dist.ProcessGroup:
        """Return a group of all processes for one pipeline; the first one joins the world."""
        limit = timedelta(seconds=timeout)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=limit)
            # Finalizers run last made, first run: pipelines close before their world does.
            weakref.finalize(dist, _leave)
        group = dist.new_group(backend="gloo", timeout=limit)
        assert isinstance(group, dist.ProcessGroup)
        return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
