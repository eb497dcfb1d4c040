"""Jobs of real processes for tests: started as torchrun starts them, killed, and read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = "tests.running.job_program"
_NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "STAGELINE_", "TORCHELASTIC_", "COV")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Job:
    """Processes that run the program of tests, and what they have reported.

    Args:
        folder: For reports and output; of this job alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a command as a group of processes of its own."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_OURS)}
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        own.update(PYTHONPATH=paths, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **env)
        output = (self.folder / f"output{len(self.processes)}").open("wb")
        with output:
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=own,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def start_ranks(
        self,
        num_ranks: int,
        steps: int,
        *,
        transport: str | None = None,
        env: Sequence[Mapping[str, str]] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        """Start one process per rank, with the variables that torchrun sets."""
        port = str(free_port())
        for rank in range(num_ranks):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **(env[rank] if env else {}),
            }
            self.start([*prefix, *self.command(steps, transport)], variables)

    def command(self, steps: int, transport: str | None = None) -> list[str]:
        more = [] if transport is None else [transport]
        return [sys.executable, "-m", PROGRAM, str(self.folder), str(steps), *more]

    def reports(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """Return what a rank has reported so far."""
        path = self.folder / f"rank{rank}"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        told = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in told if one["kind"] == kind]

    def wait_for(self, rank: int, kind: str, timeout: float = 90) -> dict[str, Any]:
        """Wait for a rank to report something; what all have printed is in the error if not."""
        deadline = time.monotonic() + timeout
        while not (found := self.reports(rank, kind)):
            ended = all(process.poll() is not None for process in self.processes)
            if time.monotonic() > deadline or (ended and not self.reports(rank, kind)):
                raise AssertionError(f"rank {rank} has not reported {kind!r}\n{self.printed()}")
            time.sleep(0.02)
        return found[0]

    def wait(self, timeout: float = 90) -> list[int]:
        """Wait for the end of all processes; return their exit codes."""
        try:
            return [process.wait(timeout) for process in self.processes]
        except subprocess.TimeoutExpired as expired:
            raise AssertionError(f"{expired}\n{self.printed()}") from None

    def printed(self) -> str:
        outputs = sorted(self.folder.glob("output*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in outputs)
