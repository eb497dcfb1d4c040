"""Threads leave no trace: at exit, after garbage collection, after Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.running.workers import WorkerPool, _Outcomes

PROLOGUE = """
import threading, time, torch, stageline as sl
from torch import nn
def build(stage=None):
    layers = [nn.Linear(4, 4), nn.ReLU(), stage or nn.Linear(4, 4), nn.Linear(4, 4)]
    return sl.Pipeline(nn.Sequential(*layers), split=[2, 1, 1], num_microbatches=4,
                       loss_fn=nn.functional.mse_loss)
def step(pipe):
    return pipe.step(torch.randn(8, 4), target=torch.randn(8, 4)).loss.item()
"""


def run_script(body: str, tmp_path: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(PROLOGUE + body)
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def stageline_threads() -> list[str]:
    gc.collect()  # pipelines of earlier tests may be waiting for it
    return [t.name for t in threading.enumerate() if t.name.startswith("stageline")]


def build() -> sl.Pipeline:
    return sl.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        split=2,
        num_microbatches=2,
        loss_fn=nn.functional.mse_loss,
    )


def step(pipe: sl.Pipeline) -> None:
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))


def test_threads_are_made_once_and_end_with_their_pipeline() -> None:
    before = stageline_threads()
    pipe = build()
    assert stageline_threads() == before, "no thread before the first step"
    step(pipe)
    after_one = stageline_threads()
    assert len(after_one) == len(before) + 2
    step(pipe)
    assert stageline_threads() == after_one
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None, "something still holds the pipeline"
    assert stageline_threads() == before


def test_a_closed_pipeline_can_be_used_again() -> None:
    before = stageline_threads()
    pipe = build()
    step(pipe)
    pipe.close()
    assert stageline_threads() == before
    step(pipe)
    pipe.close()


def test_a_pipeline_that_failed_can_be_collected() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    before = stageline_threads()
    pipe = sl.Pipeline.from_stages([nn.Identity(), fail], num_microbatches=2)
    with pytest.raises(sl.StepError):
        pipe(torch.randn(2, 2))
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    assert stageline_threads() == before


@pytest.mark.processes
def test_a_script_that_never_closes_its_pipeline_ends(tmp_path: Path) -> None:
    done = run_script("pipe = build(); step(pipe); print('end')", tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")


@pytest.mark.processes
def test_an_exception_at_top_level_ends_the_script(tmp_path: Path) -> None:
    done = run_script("pipe = build(); step(pipe); raise ValueError('mine')", tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: mine")


# Who starts the tests in the background of a shell hands down that SIGINT is ignored, and Python
# leaves it at that: no interrupt would come.
INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow(nn.Linear):
    calls = 0
    def forward(self, x):
        Slow.calls += 1
        if Slow.calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return super().forward(x)
pipe = build(Slow(4, 4))
try:
    step(pipe)
except KeyboardInterrupt:
    print("interrupted")
print(round(step(pipe), 1) >= 0, "next step works")
del pipe
import gc; gc.collect()
print([t.name for t in threading.enumerate()])
"""


@pytest.mark.processes
def test_ctrl_c_stops_a_step_and_the_next_one_works(tmp_path: Path) -> None:
    done = run_script(INTERRUPTED, tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["interrupted", "True next step works", "['MainThread']"]


@pytest.mark.processes
def test_ctrl_c_that_nobody_catches_ends_the_script(tmp_path: Path) -> None:
    done = run_script(
        INTERRUPTED.replace("except KeyboardInterrupt", "except ZeroDivisionError"), tmp_path
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr.strip().endswith("KeyboardInterrupt")


@pytest.mark.processes
def test_a_second_ctrl_c_does_not_wait_for_a_stage_that_hangs(tmp_path: Path) -> None:
    # The second one must not come before the first has been taken, or the two become one.
    again = "[time.sleep(0.01) for _ in iter(lambda: bool(seen), True)]"
    hangs = INTERRUPTED.replace(
        "time.sleep(0.2)", f"{again}; os.kill(os.getpid(), signal.SIGINT); time.sleep(600)"
    ).replace("class Slow", "seen = []\nsignal.signal(signal.SIGINT, note)\nclass Slow")
    hangs = "def note(*_):\n    seen.append(1)\n    raise KeyboardInterrupt\n" + hangs
    leave = "import sys; sys.stdout.flush(); os._exit(7) #"
    done = run_script(hangs.replace("print(round", leave), tmp_path)
    assert (done.returncode, done.stdout) == (7, "interrupted\n")


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_threads_of_its_own(tmp_path: Path) -> None:
    """DataLoader workers are forks: the child inherits the pool but none of its threads."""
    body = """
import os
torch.set_num_threads(1)
pipe = build(); step(pipe)
child = os.fork()
if child == 0:
    step(pipe)
    os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run_script(body, tmp_path)
    assert done.stdout.strip() == "5", done.stderr


def test_jobs_run_at_the_same_time() -> None:
    """Each job waits for the other, so one thread alone could not finish."""
    pool = WorkerPool(2)
    a, b = threading.Event(), threading.Event()

    def first() -> None:
        a.set()
        assert b.wait(10)

    def second() -> None:
        b.set()
        assert a.wait(10)

    assert pool.run([first, second], on_failure=lambda: None) == []
    pool.close()


def test_an_interrupt_just_after_a_job_has_ended_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used to take the outcome along, and the caller waited for one that never came."""
    pool = WorkerPool(2)
    wait, interrupts = _Outcomes.wait, [KeyboardInterrupt()]

    def interrupted(outcomes: _Outcomes) -> None:
        wait(outcomes)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(_Outcomes, "wait", interrupted)
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pool.run([lambda: None, lambda: None], on_failure=lambda: told.append("stop"))
    assert told == ["stop"]
    assert pool.run([lambda: None, lambda: None], on_failure=lambda: None) == []
    pool.close()


def test_failures_come_in_the_order_in_which_they_happened() -> None:
    pool = WorkerPool(2)
    told = threading.Event()

    def late() -> None:
        assert told.wait(10)
        raise ValueError("late")

    def early() -> None:
        raise KeyError("early")

    failures = pool.run([late, early], on_failure=told.set)
    assert [type(failure) for failure in failures] == [KeyError, ValueError]
    pool.close()
