"""Processes that call a function together: forked, for importing torch takes seconds each."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 5.0  # seconds between two looks for the process that has started us


class Ranks:
    """A world of processes that sleep between calls; make it before this process has threads.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="stageline-bench-")
        context = multiprocessing.get_context("fork")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            told = (rank, size, f"file://{self._folder.name}/store", theirs, os.getpid())
            process = context.Process(target=_serve, args=told, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Call ``function(rank, *args)`` on every rank; return what each has returned.

        Raises:
            RuntimeError: One has failed, or did not answer in time.
        """
        for connection in self._connections:
            connection.send((function, args))
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            pending = [c for rank, c in enumerate(self._connections) if rank not in answers]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"ranks did not answer within {timeout:g} s")
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    failure, answers[rank] = connection.recv()
                    if failure is not None:
                        raise RuntimeError(f"rank {rank} raised:\n{failure}")
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Let the processes end, or end them."""
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, connection: Connection, parent: int) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    while (task := _next(connection, parent)) is not None:
        function, args = task
        try:
            connection.send((None, function(rank, *args)))
        except BaseException:
            connection.send((traceback.format_exc(), None))
    dist.destroy_process_group()


def _next(connection: Connection, parent: int) -> Any:
    while not connection.poll(PATIENCE):
        if os.getppid() != parent:
            os._exit(1)
    return connection.recv()
