"""Functions run on several real processes: a pool per world size, alive for many tests.

Importing torch costs seconds per process, so the processes stay. Each joins a gloo world once; a
task is a function that can be imported by name, called on every rank with the same arguments. The
first failure is raised here with the traceback of the rank that had it; a task that outlives its
deadline is killed together with the pool, and the next task gets new processes.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist


class RanksFailed(AssertionError):
    """A task failed on some rank; the message holds its traceback."""


@dataclass(frozen=True)
class _Worker:
    process: Any
    connection: Connection


class RankPool:
    """Processes that form a ``torch.distributed`` world and run one function at a time.

    Args:
        world_size: How many processes.
        env: Environment variables set in each of them.
    """

    def __init__(self, world_size: int, env: dict[str, str] | None = None) -> None:
        self.world_size = world_size
        self._env = dict(env or {})
        self._workers: list[_Worker] = []
        self._folder: str | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(rank, *args)`` on every rank; return what each returned."""
        if not self._workers:
            self._start()
        for worker in self._workers:
            worker.connection.send((function, args))
        try:
            return self._collect(timeout)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.mkdtemp(prefix="stageline-ranks-")
        store = os.path.join(self._folder, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, store, theirs, self._env, sys.path),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world_size:
            pending = [w.connection for r, w in enumerate(self._workers) if r not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(self.world_size) if rank not in results]
                raise RanksFailed(f"ranks {missing} did not answer within {timeout:g} s")
            for rank, worker in enumerate(self._workers):
                if worker.connection in ready:
                    results[rank] = self._answer(rank, worker)
        return [results[rank] for rank in range(self.world_size)]

    def _answer(self, rank: int, worker: _Worker) -> Any:
        try:
            failure, value = worker.connection.recv()
        except EOFError:
            worker.process.join(1.0)
            code = worker.process.exitcode
            raise RanksFailed(f"rank {rank} ended with exit code {code}") from None
        if failure is not None:
            raise RanksFailed(f"rank {rank} raised:\n{failure}")
        return value

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(2.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _serve(
    rank: int,
    world_size: int,
    store: str,
    connection: Connection,
    env: dict[str, str],
    path: list[str],
) -> None:
    """Run tasks until the other end of the connection is closed."""
    sys.path[:] = path
    os.environ.update(env)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send((None, function(rank, *args)))
        except BaseException:
            connection.send((traceback.format_exc(), None))
    dist.destroy_process_group()
