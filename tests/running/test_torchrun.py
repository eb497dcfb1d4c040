"""What a person reads when a rank of a torchrun job fails: the first error, once, as the cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.people.commands import NOT_A_USERS, ROOT

pytestmark = pytest.mark.processes

JOB = Path(__file__).with_name("faulty_job.py")


@dataclass(frozen=True)
class Run:
    """What torchrun printed.

    Attributes:
        stderr: Of all ranks and of torchrun itself.
        root: The section of the root cause in its summary.
        others: The sections of other failures.
    """

    stderr: str
    root: str
    others: list[str]

    @property
    def of_ranks(self) -> str:
        """All before torchrun's own words."""
        return self.stderr.partition("ChildFailedError")[0]


def torchrun(size: int, how: str, victim: int, transport: str, folder: Path) -> Run:
    """Run a job that fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(NOT_A_USERS)}
    environment.update(TMPDIR=str(folder), OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"),
            *(JOB, how, str(victim), transport),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 1, err
    nothing_is_left(process.pid, folder)
    summary = err.rpartition("FAILED\n")[2]
    failures, _, root = summary.partition("Root Cause (first observed failure):")
    sections = re.split(r"^\[\d+\]:$", failures, flags=re.MULTILINE)[1:]
    note_times(out, how, transport)
    return Run(err, root, sections)


def nothing_is_left(group: int, folder: Path) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
    assert list(folder.glob("stageline-*")) == []


def note_times(out: str, how: str, transport: str) -> None:
    """Check how long after the fault the other ranks raised."""
    fault = re.findall(r"^fault (\S+)$", out, flags=re.MULTILINE)
    raised = re.findall(r"^raised (\S+)$", out, flags=re.MULTILINE)
    assert all(float(one) - float(fault[0]) < 10 for one in raised if fault)


def check(run: Run, size: int, victim: int) -> None:
    """The victim's error is the root cause, with its traceback; all others point to it."""
    assert f"rank      : {victim} " in run.root
    assert "Boom: the cause" in run.root
    assert "line" in run.root
    assert len(run.others) == size - 1
    for other in run.others:
        assert f"traceback : stopped, because rank {victim} failed: see there" in other
    raising = re.findall(r"^(.*): (?:\w+\.)?Boom: the cause$", run.of_ranks, flags=re.MULTILINE)
    assert raising == [f"[rank{victim}]"]


@pytest.mark.parametrize(
    ("how", "victim", "transport"), [("raise", 1, "shared-memory"), ("raise", 0, "process-group")]
)
def test_an_exception_in_a_step(how: str, victim: int, transport: str, tmp_path: Path) -> None:
    run = torchrun(2, how, victim, transport, tmp_path)
    check(run, 2, victim)
    assert f"rank {victim}, stage {victim}, microbatch 1: action {victim}F1 failed" in run.root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "victim", "transport"),
    [
        ("raise", 3, "shared-memory"),
        ("raise", 1, "process-group"),
        ("outside", 0, "shared-memory"),
        ("outside", 3, "process-group"),
        ("construction", 0, "process-group"),
        ("construction", 1, "shared-memory"),
    ],
)
def test_an_exception_anywhere(how: str, victim: int, transport: str, tmp_path: Path) -> None:
    check(torchrun(4, how, victim, transport, tmp_path), 4, victim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "victim", "transport"),
    [
        ("kill", 0, "shared-memory"),
        ("kill", 1, "process-group"),
        ("terminate", 0, "process-group"),
        ("terminate", 1, "shared-memory"),
    ],
)
def test_a_signal(how: str, victim: int, transport: str, tmp_path: Path) -> None:
    run = torchrun(2, how, victim, transport, tmp_path)
    assert f"rank      : {victim} " in run.root
    assert ("SIGKILL" if how == "kill" else "SIGTERM") in run.root
    (other,) = run.others
    told = f"rank {victim} is gone" if how == "kill" else f"rank {victim} was ended by SIGTERM"
    assert told in other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("seed", "rank 1 has another seed than rank 0"),
        ("code", "ranks 0 and 1 have built different pipelines"),
        ("plan", "ranks 0 and 1 have built different pipelines"),
        ("batch", "rank 1 was given another batch than rank 0: args[0] is float32 (6, 4)"),
        ("exit in a step", "SystemExit: 3"),
        ("leave", "rank 1 has left: its script has ended"),
        ("before", "rank      : 1 "),
    ],
)
def test_ranks_that_differ(how: str, told: str, tmp_path: Path) -> None:
    run = torchrun(2, how, 1, "shared-memory", tmp_path)
    assert told in run.root
