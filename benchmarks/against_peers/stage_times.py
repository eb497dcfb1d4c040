"""How long the two stages take while both cores are busy, with nothing to wait for.

Each of two processes, or of two threads, runs forward, backward and optimizer step of its own
stage, again and again and without the other, on microbatches that it has. What a schedule makes of
these times is the limit of every pipeline that runs it: no message, no wait beyond those in the
schedule. Threads share the interpreter's lock, which alone makes their stages slower.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models import Case
from stageline.running.allocator import keep_freed_memory
from stageline.torch_private import run_backward


class Stage:
    """One of two stages, alone."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        layers = list(case.layers(case.dropout))
        first = case.cuts[2][0]
        before, mine = (layers[:first], layers[first:]) if self.rank else ([], layers[:first])
        self.module = nn.Sequential(*mine)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=case.rate)
        with torch.no_grad():
            self.inputs = [nn.Sequential(*before)(x) for x, _ in case.microbatches()]
            self.root = torch.full((), 1 / case.num_microbatches)
            if self.rank == 0:
                self.root = torch.randn_like(self.module(self.inputs[0])) * 1e-3
        self.targets = [y for _, y in case.microbatches()]
        self.spent: list[list[float]] = [[], [], []]  # forwards, backwards, optimizer steps

    def step(self) -> None:
        """Run all microbatches, the first stage one forward ahead as in 1F1B."""
        ahead: deque[Tensor] = deque()
        for x, y in zip(self.inputs, self.targets, strict=True):
            ahead.append(self._timed(0, partial(self._forward, x, y)))
            if len(ahead) == 2 - self.rank:
                self._backward(ahead)
        while ahead:
            self._backward(ahead)
        self._timed(2, self._update)

    def _timed(self, what: int, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        self.spent[what].append(time.perf_counter() - start)
        return result

    def _forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.rank == 0:
            output: Tensor = self.module(x)
            return output
        return self.case.loss(self.module(x.detach().requires_grad_()), y)

    def _backward(self, ahead: deque[Tensor]) -> None:
        output = ahead.popleft()
        self._timed(1, partial(run_backward, [output], [self.root]))

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(case: Case, both: int = 0) -> Callable[[int], dict[str, Any]]:
    """Return a turn: stages are run for a while, and all their times returned.

    Args:
        case: Whose stages.
        both: Whether this process plays both ranks, in threads, and not the one that the
            environment names.
    """
    keep_freed_memory()  # as every pipeline of ours does
    ranks = [0, 1] if both else [int(os.environ["RANK"])]
    stages = [Stage(case, rank) for rank in ranks]

    def turn(steps: int) -> dict[str, Any]:
        cpu = time.process_time()
        if len(stages) == 1:
            _run(stages[0], steps)
        else:
            with ThreadPoolExecutor(len(stages)) as threads:
                list(threads.map(partial(_run, steps=steps), stages))
        cpu = time.process_time() - cpu
        kinds = ("forwards", "backwards", "updates")
        told = [dict(zip(kinds, stage.spent, strict=True)) for stage in stages]
        return {"ranks": told, "cpu": cpu / (steps + 2)}

    return turn


def _run(stage: Stage, steps: int) -> None:
    """Run some steps, and one before and one after them that is not counted.

    The first warms up; in the last the other stage comes to its end, with both cores busy.
    """
    stage.step()
    stage.spent = [[], [], []]
    for _ in range(steps):
        stage.step()
    counted = [times[:] for times in stage.spent]
    stage.step()
    stage.spent = counted
