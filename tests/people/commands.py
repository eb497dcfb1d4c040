"""Runs what a person would type, and shows what it printed when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"

# Variables of the test run itself: its colours, its rank if it has one, and the coverage that would
# make every start of a process a second slower.
NOT_A_USERS = ("FORCE_COLOR", "PY_COLORS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "COVERAGE_", "COV_")


def run_command(*command: str | Path, cwd: Path = ROOT, timeout: float = 120) -> str:
    """Run a command to its end and return what it printed to stdout.

    A failure, or no end within `timeout` seconds, is an AssertionError with all that was printed.
    """
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(NOT_A_USERS)}
    environment["PYTHONPATH"] = str(EXAMPLES)
    environment["PYTHONUNBUFFERED"] = "1"  # a command that hangs has shown how far it came
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # torchrun passes SIGTERM on to its ranks; SIGKILL would leave them running.
        process.terminate()
        out, err = process.communicate()
        raise AssertionError(report(words, f"did not end in {timeout} s", out, err)) from None
    if process.returncode:
        raise AssertionError(report(words, f"exited with {process.returncode}", out, err))
    return out


def run_python(script: Path, *arguments: str, cwd: Path = ROOT, timeout: float = 120) -> str:
    """Run a script with warnings as errors."""
    return run_command(sys.executable, "-W", "error", script, *arguments, cwd=cwd, timeout=timeout)


def run_torchrun(
    num_processes: int,
    script: Path,
    *arguments: str,
    only_rank: int | None = None,
    timeout: float = 120,
) -> str:
    """Run a script in several processes, as `torchrun` does; the port is any free one.

    What one rank prints is returned alone on request: lines of several may run into each other.
    """
    return run_command(
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={num_processes}",
        *([] if only_rank is None else [f"--local-ranks-filter={only_rank}"]),
        script,
        *arguments,
        timeout=timeout,
    )


def report(words: list[str], what: str, out: str, err: str) -> str:
    return f"{' '.join(words)}\n{what}\n--- stdout\n{out}\n--- stderr\n{err}"
