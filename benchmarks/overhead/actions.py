"""Stages of one element: what an action costs beyond the arithmetic and autograd of the user.

Two loops written by hand say what that is. *Plain* is the model without stages, one backward per
microbatch; *by hand* has a graph per stage and calls autograd's engine once for each, as every
pipeline must.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import pipelining
from torch.nn import functional as F

import stageline as sl
from benchmarks.tools.pages import table
from benchmarks.tools.ranks import Ranks
from stageline.observing.recorder import Recorder
from stageline.running.split.worth import VARIABLE
from stageline.testing import plain_step
from stageline.torch_private import gradients_of, run_backward

MICROBATCHES = 64
SECONDS = 0.1  # of a turn; at least one step


class Own(nn.Module):
    """One element times a weight, as a class of the user's: it might draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@dataclass(frozen=True)
class Stages:
    """Stages of one element.

    Attributes:
        number: How many.
        own: Whether they are a class of the user's, instead of torch's own Linear.
    """

    number: int
    own: bool = False

    def __str__(self) -> str:
        return f"{self.number} {'own modules' if self.own else 'Linear'}"

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        kind = Own if self.own else partial(nn.Linear, 1, 1, bias=False)
        return nn.Sequential(*(kind() for _ in range(self.number)))


@dataclass(frozen=True)
class Contestant:
    """One way to run a step.

    Attributes:
        name: For the table.
        stages: How many the model has, and of which kind.
        ranks: How many processes take part; 1: only rank 0, whatever threads it has.
        workers: How many rows run at the same time.
        kinds: Actions per stage and microbatch: F and B, or F, I and W.
        build: Returns a step, which returns the loss where it is known.
    """

    name: str
    stages: Stages
    ranks: int
    workers: int
    build: Callable[[Stages], Callable[[], Tensor | None]]
    kinds: int = 2

    @property
    def actions(self) -> int:
        return self.stages.number * MICROBATCHES * self.kinds


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(MICROBATCHES, 1), torch.randn(MICROBATCHES, 1)


def plain(stages: Stages) -> Callable[[], Tensor]:
    """The model as it is."""
    whole, (x, y) = stages.model(), batch()
    parts = list(zip(x.split(1), y.split(1), strict=True))

    def step() -> Tensor:
        total = torch.zeros(())
        for inputs, target in parts:
            loss = F.mse_loss(whole(inputs), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        return total

    return step


def _in_stages(modules: Sequence[nn.Module], value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Run modules, each with a graph of its own; return what has entered and what has left them."""
    entered, left = [], []
    for module in modules:
        value = value.detach().requires_grad_()
        entered.append(value)
        value = module(value)
        left.append(value)
    return entered, left


def by_hand(stages: Stages) -> Callable[[], Tensor]:
    """A graph per stage, and nothing else that a pipeline would do."""
    modules, (x, y) = list(stages.model()), batch()
    parts = list(zip(x.split(1), y.split(1), strict=True))
    share = torch.tensor(1 / MICROBATCHES)

    def step() -> Tensor:
        total = torch.zeros(())
        for value, target in parts:
            entered, left = _in_stages(modules, value)
            loss = F.mse_loss(left[-1], target)
            total += loss.detach() * share
            run_backward([loss], [share])
            for inputs, output in zip(entered[:0:-1], left[-2::-1], strict=True):
                assert inputs.grad is not None
                run_backward([output], [inputs.grad])
        return total

    return step


def by_hand_in_halves(stages: Stages) -> Callable[[], Tensor]:
    """The same with two backwards for a stage: to its input, and to its weights."""
    modules, (x, y) = list(stages.model()), batch()
    weights = [tuple(module.parameters()) for module in modules]
    parts = list(zip(x.split(1), y.split(1), strict=True))
    share = torch.tensor(1 / MICROBATCHES)

    def step() -> Tensor:
        total = torch.zeros(())
        for value, target in parts:
            entered, left = _in_stages(modules, value)
            left[-1] = F.mse_loss(left[-1], target)
            total += left[-1].detach() * share
            gradient: Tensor | None = share
            for inputs, output, parameters in zip(
                entered[:0:-1], left[:0:-1], weights[:0:-1], strict=True
            ):
                assert gradient is not None
                (before,) = gradients_of(get_gradient_edge(output), gradient, [inputs])
                run_backward([output], [gradient], parameters)
                gradient = before
            assert gradient is not None
            run_backward([left[0]], [gradient])
        return total

    return step


def ours(
    stages: Stages,
    *,
    ranks: int,
    transport: str,
    schedule: str = "1f1b",
    observed: bool = False,
    in_threads: bool = False,
    splits_all: bool = False,
) -> Callable[[], Tensor]:
    """A pipeline; with an observer it keeps all events of a step.

    Args:
        stages: Of the model.
        ranks: How many play it.
        transport: What carries packets.
        schedule: Its name.
        observed: Whether there is an observer.
        in_threads: Whether it never takes turns, however small its stages are.
        splits_all: Whether it splits backwards, however small its stages are.
    """
    x, y = batch()
    recorder = Recorder() if observed else None
    pipe = sl.Pipeline(
        stages.model(),
        split=[1] * stages.number,
        ranks=ranks,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=F.mse_loss,
        transport=transport,
        observer=recorder,
    )
    if in_threads:
        vars(pipe._engine.runner)["_takes_turns"] = False

    def step() -> Tensor:
        if recorder is not None:
            recorder.clear()
        os.environ[VARIABLE] = "1" if splits_all else "0"
        return pipe.step(x, target=y).loss

    return step


def peer(stages: Stages) -> Callable[[], Tensor | None]:
    """torch.distributed.pipelining, a stage per process."""
    x, y = batch()
    rank = dist.get_rank()
    stage = pipelining.PipelineStage(stages.model()[rank], rank, stages.number, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        return torch.stack(losses).detach().mean() if losses else None

    return step


def loops(stages: Stages) -> list[Contestant]:
    return [
        Contestant(f"plain loop, {stages}", stages, 1, 1, plain),
        Contestant(f"by hand, {stages}", stages, 1, 1, by_hand),
    ]


def alone(name: str, stages: Stages, kinds: int = 2, **options: Any) -> Contestant:
    build = partial(ours, ranks=1, transport="memory", **options)
    return Contestant(f"{name}, {stages}", stages, 1, 1, build, kinds)


def split(stages: Stages) -> list[Contestant]:
    """A schedule with I and W: as it runs by default, and with bridges in all stages."""
    name, kinds = "one rank in a thread, zb-h1", 3
    return [
        Contestant(f"by hand, I and W, {stages}", stages, 1, 1, by_hand_in_halves, kinds),
        alone(name, stages, kinds, schedule="zb-h1", in_threads=True),
        alone(
            f"{name}, all split", stages, kinds, schedule="zb-h1", in_threads=True, splits_all=True
        ),
    ]


FOUR, MINE, TWO = Stages(4), Stages(4, own=True), Stages(2)
EVERYBODY = [
    *loops(FOUR),
    alone("one rank", FOUR),
    alone("one rank again (A/A)", FOUR),
    alone("one rank in a thread", FOUR, in_threads=True),
    alone("one rank in a thread, events kept", FOUR, observed=True),
    *split(FOUR),
    *loops(MINE),
    alone("one rank", MINE),
    alone("one rank in a thread", MINE, in_threads=True),
    *split(MINE),
    *loops(TWO),
    Contestant("two ranks, in turn", TWO, 1, 2, partial(ours, ranks=2, transport="memory")),
    Contestant(
        "two threads", TWO, 1, 2, partial(ours, ranks=2, transport="memory", in_threads=True)
    ),
    *(
        Contestant(name, TWO, 2, 2, partial(ours, ranks=2, transport=transport))
        for name, transport in (
            ("two processes, shared memory", "shared-memory"),
            ("two processes, gloo", "process-group"),
        )
    ),
    Contestant("torch pipelining, two processes, gloo", TWO, 2, 2, peer),
]

_steps: dict[str, Callable[[], Tensor | None]] = {}  # in each process: those that take part


def prepare(rank: int, index: int) -> None:
    """Build a contestant in a process, and compare its loss with the plain model's.

    Raises:
        AssertionError: It is another one.
    """
    contestant = EVERYBODY[index]
    if rank >= contestant.ranks:
        return
    x, y = batch()
    wanted = plain_step(
        contestant.stages.model(), x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss
    )
    step = contestant.build(contestant.stages)
    for _ in range(2):  # gradients add up, the loss stays
        found = step()
        if found is not None:
            torch.testing.assert_close(found, wanted.loss)
    _steps[contestant.name] = step


def turn(rank: int, index: int, steps: int) -> tuple[float, float]:
    """Return the seconds of a step and, of this process, the CPU seconds."""
    contestant = EVERYBODY[index]
    if rank >= contestant.ranks:
        return math.nan, 0.0
    step = _steps[contestant.name]
    step()  # what the others left in the caches is no matter of ours
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps


@dataclass(frozen=True)
class Result:
    """Seconds of a step of every contestant in every round, on the clock and of all processors."""

    wall: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Sequence[float]]


def run(rounds: int) -> Result:
    """Let all contestants have one turn per round, in random order."""
    wall: dict[str, list[float]] = {each.name: [] for each in EVERYBODY}
    cpu: dict[str, list[float]] = {each.name: [] for each in EVERYBODY}
    shuffle = random.Random(0)
    with Ranks(2) as ranks:
        many = []
        for index in range(len(EVERYBODY)):
            ranks.run(prepare, index)
            once = ranks.run(turn, index, 1)[0][0]
            many.append(max(1, round(SECONDS / once)))
        for _ in range(rounds):
            for index in shuffle.sample(range(len(EVERYBODY)), len(EVERYBODY)):
                found = ranks.run(turn, index, many[index])
                wall[EVERYBODY[index].name].append(found[0][0])
                cpu[EVERYBODY[index].name].append(sum(each for _, each in found))
    return Result(wall, cpu)


def text(result: Result) -> str:
    """Return the table."""
    head = ["", "us per action", "CPU us per action", "CPU over plain", "CPU over by hand"]
    rows = []
    for each in EVERYBODY:
        wall = statistics.median(result.wall[each.name]) * each.workers / each.actions
        cpu = statistics.median(result.cpu[each.name]) / each.actions
        by_hand = "by hand" if each.kinds == 2 else "by hand, I and W"
        over = [_beyond(result, each, f"{loop}, {each.stages}") for loop in ("plain loop", by_hand)]
        rows.append([each.name, *(f"{1e6 * value:.1f}" for value in (wall, cpu, *over))])
    rounds = len(next(iter(result.wall.values())))
    return f"{table(head, rows)}\n\nMedians of {rounds} rounds, {MICROBATCHES} microbatches."


def _beyond(result: Result, each: Contestant, reference: str) -> float:
    """Return CPU seconds per action beyond a loop's; differences within rounds, then the median."""
    pairs = zip(result.cpu[each.name], result.cpu[reference], strict=True)
    return statistics.median(a - b for a, b in pairs) / each.actions
