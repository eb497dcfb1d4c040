"""What each process of the measurement does: pipelines of all modes, timed and looked into."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageline as sl
from benchmarks.memory.counted import counted
from benchmarks.memory.held import Trace
from benchmarks.tools.gpt import gpt, next_token_loss

RANKS = 2
NEVER, AGAIN = "never", "never again"
ALL: dict[str, Any] = {
    NEVER: "never",
    AGAIN: "never",
    "except_last": "except_last",
    "waiting": "waiting",
    "[0]": [0],
    "always": "always",
}
FEWER = {name: ALL[name] for name in (NEVER, AGAIN, "waiting", "always")}
"""How modes are called in the table, and the argument ``recompute=``."""


@dataclass(frozen=True)
class Work:
    """A model, its batch, and how often it is run.

    Attributes:
        rounds: How often every mode has its turn.
        repeats: How often each block is timed for the forecast.
    """

    width: int
    length: int
    num_layers: int
    rows: int
    num_microbatches: int
    rounds: int
    repeats: int
    vocabulary: int = 2000

    @property
    def sizes(self) -> list[int]:
        """Blocks of each stage: half of the layers, and the embedding or the head."""
        return [self.num_layers // 2 + 1] * RANKS

    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        shape = (self.rows * self.num_microbatches, self.length)
        return torch.randint(self.vocabulary, shape), torch.randint(self.vocabulary, shape)


@dataclass(frozen=True)
class Contestant:
    """A schedule with a mode.

    Attributes:
        name: Of the mode, in the table.
        recompute: What the pipeline is told.
    """

    schedule: str
    name: str
    recompute: Any


def contestants(schedule: str, modes: Mapping[str, Any]) -> list[Contestant]:
    return [Contestant(schedule, name, recompute) for name, recompute in modes.items()]


GROUPS = [
    [*contestants("1f1b", ALL), Contestant("varuna", "its own", "never")],
    contestants("gpipe", ALL),
    contestants("zb-h1", FEWER),
]
"""Contestants that run in turns; what the first one takes is 1."""


@dataclass
class Answer:
    """What one process has seen of some contestants, each a number in a list.

    Attributes:
        costs: What its blocks cost, measured before the first round and after the last, as JSON.
        rows: The schedules as text.
        seconds: What a step took in each round.
        held: What ``benchmarks/memory`` counts.
        right: Whether loss and gradients are those of the first one.
    """

    costs: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)


class Running:
    """The pipeline of a contestant; all of them share one model."""

    def __init__(self, model: nn.Sequential, work: Work, contestant: Contestant) -> None:
        self._trace: Trace | None = None
        self._batch = work.batch()
        self.pipe = sl.Pipeline(
            model,
            split=work.sizes,
            ranks=RANKS,
            num_microbatches=work.num_microbatches,
            schedule=contestant.schedule,
            loss_fn=next_token_loss,
            recompute=contestant.recompute,
            observer=self._note,
        )

    def _note(self, event: sl.ActionDone) -> None:
        if self._trace is not None:
            self._trace.mark(event.action)

    def step(self) -> Tensor:
        x, y = self._batch
        return self.pipe.step(x, target=y).loss

    def result(self) -> list[Tensor]:
        """Return loss and gradients of a first step."""
        self.pipe.zero_grad()
        self.pipe.step_number = 0
        loss = self.step()
        return [loss, *(p.grad.clone() for p in self.pipe.parameters() if p.grad is not None)]

    def timed(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def looked_into(self) -> dict[str, Any]:
        """Return what is held in a step; gradients exist by now, so that it adds to them."""
        with Trace() as trace:
            self._trace = trace
            trace.mark("begin")
            self.step()
            self._trace = None
        return counted(trace.moments)


def measure(rank: int, group: Sequence[Contestant], work: Work) -> Answer:
    """Run some contestants in turns, and then look into a step of each."""
    torch.manual_seed(0)
    model = gpt(
        vocabulary=work.vocabulary,
        width=work.width,
        length=work.length,
        num_layers=work.num_layers,
    )
    running = [Running(model, work, contestant) for contestant in group]
    answer = Answer(
        rows=[each.pipe.schedule.text() for each in running], seconds=[[] for _ in running]
    )
    wanted = running[0].result()
    answer.right = [all(map(torch.equal, each.result(), wanted)) for each in running]
    answer.costs.append(_costs(model, work))
    order = random.Random(0)
    for number in range(work.rounds + 1):
        for index in order.sample(range(len(running)), len(running)):
            seconds = running[index].timed()
            if number:  # the first round warms up
                answer.seconds[index].append(seconds)
    answer.costs.append(_costs(model, work))
    for each in running:
        answer.held.append(each.looked_into())
        each.pipe.close()
    return answer


def _costs(model: nn.Sequential, work: Work) -> str:
    """Measure all blocks, while the other process does the same."""
    x, y = (each[: work.rows] for each in work.batch())
    graph = sl.capture(model, (x,))
    dist.barrier()
    costs = sl.measure_costs(
        graph, repeats=work.repeats, busy=1, loss_fn=next_token_loss, target=y, progress=False
    )
    return costs.to_json()
