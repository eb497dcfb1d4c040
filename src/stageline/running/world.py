"""Is this process alone, or one of many: all that torchrun started, or a group of them?"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from stageline import log
from stageline.errors import ConfigError, PeerError
from stageline.torch_private import PrefixStore, Store, default_store


@dataclass(frozen=True)
class World:
    """This process's place among the processes of a pipeline.

    Attributes:
        rank: Its rank among them.
        size: How many they are.
        members: Their ranks in torch's world; empty if they are all of it.
    """

    rank: int
    size: int
    members: tuple[int, ...] = ()

    @classmethod
    def find(cls, group: dist.ProcessGroup | None = None) -> World | None:
        """Return the world that torchrun or the script made, or a group of it.

        None for a process alone.
        """
        if not dist.is_available():
            return None
        if group is not None:
            return cls._of(group)
        if dist.is_initialized():
            world = cls(dist.get_rank(), dist.get_world_size())
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            world = cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        else:
            return None
        return world if world.size > 1 else None

    @classmethod
    def _of(cls, group: object) -> World | None:
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns outside of it
            raise ConfigError("sl.Pipeline", [f"group: {_OUTSIDE}"])
        if not isinstance(group, dist.ProcessGroup):
            wanted = "wanted a torch.distributed.ProcessGroup, as new_group(...) returns it"
            raise ConfigError("sl.Pipeline", [f"group={group!r}: {wanted}"])
        try:
            members = tuple(dist.get_process_group_ranks(group))
            rank = dist.get_rank(group)
        except (KeyError, RuntimeError, ValueError) as cause:
            finding = "group: torch.distributed does not know it (any more): make a new one"
            raise ConfigError("sl.Pipeline", [finding]) from cause
        if rank < 0:
            raise ConfigError("sl.Pipeline", [f"group: {_OUTSIDE}"])
        if members == tuple(range(dist.get_world_size())):
            members = ()  # all of it, as if no group were named
        size = dist.get_world_size(group)
        return cls(rank, size, members) if size > 1 else None

    @property
    def name(self) -> str:
        """What the processes of a pipeline call themselves, alike on all of them."""
        return "/".join(["stageline", *map(str, self.members)])

    def waits(self, timeout: float) -> AbstractContextManager[None]:
        """Return what logs a line if the others let this process wait."""
        return log.warning_after(
            _FIRST_NOTE,
            self.rank,
            f"waits for all {self.size} processes to build this pipeline, {_FIRST_NOTE:g} s so "
            f"far (timeout={timeout:g}): each must build the same pipelines in the same order",
        )

    def store(self, timeout: float) -> Store:
        """Return the store of the job: that of the script's own world, where it has made one.

        Otherwise the store is joined and no world made: that would bring a thread of gloo's which
        wakes up a hundred times a second for nothing, and keep the script from making its own.
        """
        if not dist.is_initialized() and self in _stores:
            return _stores[self]
        limit = timedelta(seconds=timeout)
        try:
            if dist.is_initialized():
                return self._met_in(default_store(), limit)
            store, _, _ = next(rendezvous("env://", timeout=limit))
            _stores[self] = self._met_in(store, limit)
        except (dist.DistError, RuntimeError, ValueError) as cause:
            raise PeerError(
                f"rank {self.rank} did not meet the {self.size} processes of the job within "
                f"{timeout:g} s ({str(cause).splitlines()[0]}): a process has not started, has "
                "failed before, or cannot reach MASTER_ADDR and MASTER_PORT"
            ) from cause
        return _stores[self]

    def _met_in(self, store: Store, timeout: timedelta) -> Store:
        """Return a part of a store that was never used before, when all processes know of it.

        torchrun may keep its store when it starts processes again: what is there may have been left
        by those that have failed. So every process gives itself a new name, which was never
        answered before, and rank 0 answers names until all have heard of the part it has made up.

            rank 1   here/1: "5be1"   ──▶  rank 0   answer/5be1: "c0de"     also to names of old
            rank 1   c0de/1           ──▶  rank 0   c0de/all                when all have come
        """
        store = PrefixStore(self.name, store)
        if self.rank:
            name = token_hex(8)
            store.set(f"here/{self.rank}", name)
            store.wait([f"answer/{name}"], timeout)
            part = store.get(f"answer/{name}").decode()
            store.set(f"{part}/{self.rank}", "")
            store.wait([f"{part}/all"], timeout)
        else:
            part = token_hex(8)
            self._answer(store, part, timeout)
            store.set(f"{part}/all", "")
        return PrefixStore(part, store)

    def _answer(self, store: Store, part: str, timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        answered: dict[int, bytes] = {}
        missing = set(range(1, self.size))
        while missing:
            for rank in sorted(missing):
                name = store.get(f"here/{rank}") if store.check([f"here/{rank}"]) else None
                if name is not None and answered.get(rank) != name:
                    answered[rank] = name
                    store.set(f"answer/{name.decode()}", part)
                if store.check([f"{part}/{rank}"]):
                    missing.remove(rank)
            if missing and time.monotonic() > end:
                raise RuntimeError(f"rank {min(missing)} has not come")
            time.sleep(_PAUSE if missing else 0)


_OUTSIDE = "this process is not in it: call this only on its processes"
_FIRST_NOTE = 10.0  # seconds until a line tells what this process waits for
_PAUSE = 0.005  # seconds between two looks for processes that have not come
_stores: dict[World, Store] = {}  # kept for as long as this process lives: others use them
