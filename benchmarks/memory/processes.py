"""Starts the processes of a measurement and collects what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tools.world import free_port, world

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOGS = ROOT / "build" / "memory"
PATIENCE = 120.0  # seconds for one measurement, on a machine that others use too


class Failed(Exception):
    """A measurement could not be made; the message says why."""


def run(
    python: Path,
    script: str,
    size: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    patience: float = PATIENCE,
) -> list[Any]:
    """Run a script of this folder as so many ranks; return the answer of each.

    The script is told where to leave its answer, and its rank; what it prints goes to a file below
    build/. Whatever it has started ends with it.

    Raises:
        Failed: A process ended without an answer.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, (LOGS / f"{script}.txt").open("ab") as log:
        answers = [Path(folder, str(rank)) for rank in range(size)]
        processes = [
            subprocess.Popen(
                [str(python), str(HERE / script), str(answer), str(rank), *arguments],
                env=_environment() | world(rank, size, port) | dict(environment or {}),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for rank, answer in enumerate(answers)
        ]
        try:
            for process in processes:
                process.wait(patience)
        except subprocess.TimeoutExpired:
            raise Failed(f"no answer within {patience:.0f} s") from None
        finally:
            for process in processes:
                _end(process)
        missing = [rank for rank, answer in enumerate(answers) if not answer.exists()]
        if missing:
            raise Failed(f"rank {missing[0]} ended without an answer: see build/memory")
        return [json.loads(answer.read_text()) for answer in answers]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still there, and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    found = {name: os.environ[name] for name in os.environ if name not in _TORCHRUN}
    paths = (ROOT / "src", ROOT / "benchmarks" / "against_peers")
    found["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    found["OMP_NUM_THREADS"] = found["MKL_NUM_THREADS"] = "1"
    return found


_TORCHRUN = frozenset(world(0, 2, 0))
