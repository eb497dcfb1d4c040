"""Emulated devices: the step of every schedule over every transport, against its makespan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from benchmarks.tools.emulated import (
    WIDTH,
    EmulatedStage,
    emulated_stages,
    longest_chain,
    num_sleeps,
)
from benchmarks.tools.pages import table
from benchmarks.tools.ranks import Ranks
from benchmarks.tools.replaying import Chain
from stageline.testing import plain_step

RANKS, MICROBATCHES = 8, 32
TRANSPORTS = {
    "memory": "threads",
    "shared-memory": "processes, shared memory",
    "process-group": "processes, gloo",
}
RUNNABLE = (
    *(name for name in sl.schedules.NAMES if sl.schedules.family(name).refusal is None),
    "auto",
)
GOAL = 1.03


@dataclass(frozen=True)
class Step:
    """One step as it was.

    Attributes:
        seconds: How long it took.
        chain: What its schedule with its sleeps alone takes.
        sleep: How long a sleep was, on average.
    """

    seconds: float
    chain: Chain
    sleep: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.chain.seconds

    @property
    def extra(self) -> float:
        return (self.seconds - self.chain.seconds) / self.chain.actions


def measure(
    rank: int,
    schedule: str,
    transport: str,
    seconds: float,
    steps: int,
    num_ranks: int = RANKS,
    num_microbatches: int = MICROBATCHES,
) -> list[Step]:
    """Run a pipeline of emulated devices on this rank; rank 0 returns its steps.

    With threads rank 0 has all of them.

    Raises:
        AssertionError: Its loss or a gradient is not the plain model's.
    """
    if transport == "memory" and rank:
        return []
    per_rank = 1 if schedule == "auto" else sl.schedules.family(schedule).stages_per_rank
    stages = emulated_stages(per_rank * num_ranks)
    pipe = sl.Pipeline(
        nn.Sequential(*stages),
        split=[1] * len(stages),
        ranks=num_ranks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        loss_fn=F.mse_loss,
        transport=transport,
    )
    x, y = torch.randn(2, num_microbatches, WIDTH)
    if not pipe.schedule.has_backward:
        pipe.eval()
    check(pipe, x, y)
    check_replay(pipe.schedule)
    for stage in stages:
        stage.seconds = seconds
    found = [_timed(pipe, stages, x, y, alone=transport == "memory") for _ in range(steps)]
    pipe.close()
    return [step for step in found if step is not None]


def check(pipe: sl.Pipeline, x: Tensor, y: Tensor) -> None:
    """Compare a step with the plain model: what is wrong shall not be timed. It also warms up."""
    schedule = pipe.schedule
    plain = nn.Sequential(*emulated_stages(schedule.num_stages))
    wanted = plain_step(
        plain, x, target=y, num_microbatches=schedule.num_microbatches, loss_fn=F.mse_loss
    )
    found = pipe.step(x, target=y)
    torch.testing.assert_close(found.loss, wanted.loss)
    expected = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        if schedule.has_backward:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected[name].grad)
    pipe.zero_grad()


def check_replay(schedule: sl.Schedule) -> None:
    """Compare the makespan of sleeps of one second with the simulator's."""
    stages = schedule.num_stages
    count = [0] * stages
    for row in schedule.compute_only().rows():
        for action in row:
            count[action.stage] += num_sleeps(action)
    found = longest_chain(schedule, [[1.0] * each for each in count])
    costs = sl.Costs(
        forward=1,
        backward=2,
        input_gradient=[0, *[1] * (stages - 1)],
        weight_gradient=[2, *[1] * (stages - 1)],
    )
    assert found.seconds == sl.simulate(replace(schedule, pairs=()), costs).T


def _timed(
    pipe: sl.Pipeline, stages: Sequence[EmulatedStage], x: Tensor, y: Tensor, *, alone: bool
) -> Step | None:
    for stage in stages:
        stage.sleeps.clear()
    if not alone:
        dist.barrier()
    start = time.perf_counter()
    pipe.step(x, target=y)
    taken = time.perf_counter() - start
    pipe.zero_grad()
    sleeps = [list(stage.sleeps) for stage in stages]
    if not alone:
        sleeps = _gathered(sleeps)
        if dist.get_rank():
            return None
    slept = sum(map(sum, sleeps)) / sum(map(len, sleeps))
    return Step(taken, longest_chain(pipe.schedule, sleeps), slept)


def _gathered(sleeps: list[list[float]]) -> list[list[float]]:
    """Return the sleeps of all stages: on every rank those of other ranks' stages are missing."""
    everywhere: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, sleeps)
    return [max(of_stage, key=len) for of_stage in zip(*everywhere, strict=True)]


@dataclass(frozen=True)
class Point:
    """One schedule over one transport, median of its steps."""

    schedule: str
    transport: str
    steps: Sequence[Step]

    def cells(self) -> list[str]:
        taken = 1000 * statistics.median(step.seconds for step in self.steps)
        least = 1000 * statistics.median(step.chain.seconds for step in self.steps)
        extra = statistics.median(step.extra for step in self.steps)
        mark = "" if self.ratio <= GOAL else " (!)"
        return [f"{taken:.0f}", f"{least:.0f}", f"{self.ratio:.3f}{mark}", f"{1e6 * extra:.0f}"]

    @property
    def ratio(self) -> float:
        return statistics.median(step.ratio for step in self.steps)


def run(
    names: Sequence[str], transports: Sequence[str], milliseconds: float, steps: int
) -> list[Point]:
    """Measure all combinations, one after the other."""
    points = []
    with Ranks(RANKS) as ranks:
        for name in names:
            for transport in transports:
                found = ranks.run(measure, name, transport, milliseconds / 1000, steps)[0]
                points.append(Point(name, transport, found))
                print(f"{name}, {transport}: {points[-1].ratio:.3f}", flush=True)
    return points


def text(points: Sequence[Point], milliseconds: float) -> str:
    """Return the table, and what the sleeps were."""
    head = ["schedule", "ranks are", "step ms", "makespan ms", "ratio", "extra us per action"]
    rows = [[point.schedule, TRANSPORTS[point.transport], *point.cells()] for point in points]
    slept = 1000 * statistics.mean(s.sleep for point in points for s in point.steps)
    over = sum(point.ratio > GOAL for point in points)
    worst = max(points, key=lambda point: point.ratio)
    said = (
        f"Sleeps of {milliseconds:g} ms took {slept:.2f} ms on average; medians of "
        f"{len(points[0].steps)} steps. {over} of {len(points)} are above {GOAL}, marked (!); the "
        f"largest is {worst.schedule} on {TRANSPORTS[worst.transport]}, {worst.ratio:.3f}."
    )
    return f"{table(head, rows)}\n\n{said}"
