"""A script for torchrun in which one rank fails: how, which one and over which transport."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl

# Read only when it runs: tools that look for tests import every file.
RUNS = __name__ == "__main__"
HOW, VICTIM, TRANSPORT = (sys.argv[1], int(sys.argv[2]), sys.argv[3]) if RUNS else ("", 0, "")
IS_VICTIM = RUNS and int(os.environ["RANK"]) == VICTIM
SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Boom(Exception):
    """What the faulty stage raises."""


def fail_in_a_step() -> None:
    print(f"fault {time.time()}", flush=True)
    if HOW == "raise":
        raise Boom("the cause")
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    if HOW == "exit in a step":
        sys.exit(3)


class Layer(nn.Module):
    """Fails in its sixth call, where it is the victim's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if IS_VICTIM and self.calls == 6:
            fail_in_a_step()
        return self.linear(x)


def wrap(module: nn.Module, index: int) -> nn.Module:
    if IS_VICTIM and HOW == "construction":
        raise Boom("the cause")
    return module


def main() -> None:
    torch.manual_seed(VICTIM if HOW == "seed" and IS_VICTIM else 99)
    if IS_VICTIM and HOW == "before":
        raise Boom("the cause")
    width = 5 if IS_VICTIM and HOW == "code" else 4
    layers = [*(Layer() for _ in range(SIZE)), nn.Linear(4, width), nn.Linear(width, 4)]
    if HOW == "seed":
        layers[-1] = nn.Sequential(layers[-1], nn.Dropout())  # with which seeds must agree
    split = [1] * (SIZE - 1) + [3]
    if IS_VICTIM and HOW == "plan":
        split = [2, *split[1:-1], 2]
    pipe = sl.Pipeline(
        nn.Sequential(*layers),
        split=split,
        num_microbatches=4,
        loss_fn=F.mse_loss,
        transport=TRANSPORT,
        timeout=60,
        wrap_stage=wrap,
    )
    x = torch.randn(8, 4)
    for step in range(4):
        batch = x[:6] if IS_VICTIM and HOW == "batch" and step == 1 else x
        try:
            pipe.step(batch, target=batch)
        except sl.StagelineError:
            print(f"raised {time.time()}", flush=True)
            raise
        if IS_VICTIM and HOW == "outside" and step == 1:
            raise Boom("the cause")
        if IS_VICTIM and HOW == "leave" and step == 1:
            return


if RUNS:
    main()
