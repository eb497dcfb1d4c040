"""Processes that may die: a job of ranks that a test starts for itself, kills and buries.

They are forked from one process that has imported torch before, so that a job of four begins in a
fraction of a second instead of ten.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = 60.0  # seconds in which everything is over, or something hangs


@dataclass
class Life:
    """What one rank said, and how it ended.

    Attributes:
        said: What it has sent, in order: a word and more.
        exit_code: As of ``multiprocessing``: negative is a signal.
    """

    said: list[tuple[Any, ...]] = field(default_factory=list)
    exit_code: int | None = None

    def first(self, word: str) -> tuple[Any, ...] | None:
        """Return the rest of the first message that begins with a word."""
        return next((message[1:] for message in self.said if message[0] == word), None)


class Teller:
    """What a rank reports with."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, *message: Any) -> None:
        self._connection.send(message)


class Mortals:
    """A job of processes, each of which runs ``function(rank, size, tell, *args)``.

    Args:
        function: Can be imported by name; joins the world itself where it wants to.
        size: How many ranks the job has.
        args: More arguments.
        absent: Ranks that never start.
    """

    def __init__(
        self, function: Callable[..., None], size: int, *args: Any, absent: Sequence[int] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "stageline"])
        self._folder = tempfile.mkdtemp(prefix="mortals-")
        self.lives = {rank: Life() for rank in range(size) if rank not in absent}
        self._processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        for rank in self.lives:
            ours, theirs = context.Pipe()
            place = (rank, size, os.path.join(self._folder, "store"))
            self._processes[rank] = context.Process(
                target=_live, args=(function, place, theirs, args), daemon=True
            )
            self._processes[rank].start()
            theirs.close()
            self._connections[rank] = ours

    def pid(self, rank: int) -> int:
        pid: int = self._processes[rank].pid
        return pid

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def hear(self, rank: int, word: str) -> tuple[Any, ...]:
        """Wait until a rank has said a word; return the rest of its message."""
        deadline = time.monotonic() + PATIENCE
        while (heard := self.lives[rank].first(word)) is None:
            left = deadline - time.monotonic()
            if left < 0 or rank not in self._connections:
                raise AssertionError(f"rank {rank} never said {word!r}: {self.lives}")
            self._listen(left)
        return heard

    def _listen(self, seconds: float) -> None:
        ready = wait(list(self._connections.values()), timeout=seconds)
        for rank, connection in list(self._connections.items()):
            if connection in ready:
                try:
                    self.lives[rank].said.append(connection.recv())
                except EOFError:
                    self._connections.pop(rank).close()

    def bury(self) -> dict[int, Life]:
        """Wait until all ranks have ended; those that do not are a failure, and are killed."""
        deadline = time.monotonic() + PATIENCE
        while self._connections and time.monotonic() < deadline:
            self._listen(deadline - time.monotonic())
        hanging = []
        for rank, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                hanging.append(rank)
                process.kill()
                process.join()
            self.lives[rank].exit_code = process.exitcode
        left = {path.name for path in Path(self._folder).iterdir()} - {"store"}
        shutil.rmtree(self._folder)
        if hanging or left:
            raise AssertionError(f"ranks {hanging} hang, {left} are left behind; {self.lives}")
        return self.lives


def _live(
    function: Callable[..., None],
    place: tuple[int, int, str],
    connection: Connection,
    args: tuple[Any, ...],
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    rank, size, store = place
    # What it leaves behind there is found.
    os.environ["TMPDIR"] = tempfile.tempdir = os.path.dirname(store)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    function(rank, size, store, Teller(connection), *args)


def join_world(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def free_port() -> int:
    """Return a port on which nobody listens; where ranks meet as torchrun lets them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def shared_files() -> set[str]:
    """Return the files that lie in shared memory."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()
