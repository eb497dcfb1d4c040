"""What the processes of a job run in tests: train, compare with the plain model, report to a file.

python -m tests.running.job_program FOLDER STEPS [TRANSPORT]     0 steps: until somebody fails
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.control import joining
from stageline.testing import plain_step
from tests.running.sockets import listening

MICROBATCHES = 4


class Reporter(logging.Handler):
    """Writes lines of JSON that the test reads; lines of the log are among them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self.file = (folder / f"rank{os.environ['RANK']}").open("a", buffering=1)

    def say(self, kind: str, **facts: Any) -> None:
        self.file.write(json.dumps({"kind": kind, **facts}) + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.say("log", text=record.getMessage())


class WatchedDoor(joining.Door):
    """Tells which sockets the control plane has opened for the ranks to come."""

    reporter: Reporter

    def __init__(self, hosts: Any) -> None:
        before = listening()
        super().__init__(hosts)
        self.reporter.say("door", opened=sorted(listening() - before))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.Linear(20, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(step)
    rows = 8 + step % 5
    return torch.randn(rows, 6, generator=own), torch.randint(3, (rows,), generator=own)


def is_equal(pipe: sl.Pipeline, plain: nn.Module, step: int) -> bool:
    """Take one step with both; return whether loss and every gradient held here are equal."""
    x, y = batch(step)
    loss = pipe.step(x, target=y).loss
    wanted = plain_step(
        plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.cross_entropy, num_threads=1
    )
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    same = torch.equal(loss, wanted.loss)
    for name, parameter in pipe.named_parameters():
        got, plain_one = parameter.grad, gradients[name]
        assert got is not None
        assert plain_one is not None
        same = same and torch.equal(got, plain_one)
    return same


def mapped_names() -> list[str]:
    """Return the files of /dev/shm that this process has mapped, as the kernel names them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line]


def train(steps: int, transport: str | None, reporter: Reporter) -> None:
    pipe = sl.Pipeline(
        model(),
        split=2,
        num_microbatches=MICROBATCHES,
        loss_fn=F.cross_entropy,
        transport=transport,
        timeout=60,
        heartbeat_timeout=float(os.environ.get("JOB_HEARTBEAT_TIMEOUT", "30")),
    )
    plain, step, equal = model(), 0, 0
    while not steps or step < steps:
        equal += is_equal(pipe, plain, step)
        step += 1
        if step == 3:
            runner: Any = pipe._engine.runner
            reporter.say(
                "ready",
                pid=os.getpid(),
                transport=type(runner._transport).__name__,
                mapped=mapped_names(),
                listening=sorted(listening()),
            )
    pipe.close()
    reporter.say("trained", equal=equal, steps=step)


def main() -> None:
    folder, steps, transport = Path(sys.argv[1]), int(sys.argv[2]), (*sys.argv[3:], None)[0]
    torch.set_num_threads(1)
    reporter = Reporter(folder)
    logging.getLogger("stageline").addHandler(reporter)
    WatchedDoor.reporter = reporter
    joining.Door = WatchedDoor  # type: ignore[misc]
    sys.modules["stageline.running.control.job"].Door = WatchedDoor  # type: ignore[attr-defined]
    try:
        train(steps, transport, reporter)
    except sl.StagelineError as error:
        reporter.say("error", text=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
