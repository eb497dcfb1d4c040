"""How far is a predicted step from the measured one? See README.md.

torchrun --standalone --nproc-per-node 2 benchmarks/prediction/run.py [--short] [--model NAME]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from benchmarks.tools.gpt import Layer
from stageline.partitioning.costs import TIMES

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Residual(nn.Module):
    """Two convolutions around which the input goes too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second_norm(self.second(F.relu(self.norm(self.first(x))))))


@dataclass(frozen=True)
class Case:
    """A model of equal or unequal blocks, and one microbatch for it."""

    name: str
    make: Callable[[], nn.Sequential]
    shape: tuple[int, ...]


def widths(*sizes: int) -> nn.Sequential:
    layers = (nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(sizes))
    return nn.Sequential(*layers)


CASES = [
    Case("gpt", lambda: nn.Sequential(*(Layer(256) for _ in range(8))), (4, 64, 256)),
    Case("mlp", lambda: widths(*(512,) * 5, *(1024,) * 4), (128, 512)),
    Case("convolutions", lambda: nn.Sequential(*(Residual(32) for _ in range(8))), (4, 32, 16, 16)),
]
# Eight blocks; four stages lie on two ranks.
WAYS: list[tuple[str, tuple[int, ...]]] = [
    ("gpipe", (4, 4)),
    ("1f1b", (4, 4)),
    ("1f1b", (3, 5)),
    ("zb-h1", (4, 4)),
    ("zb-h1", (5, 3)),
    ("interleaved", (2, 2, 2, 2)),
    ("zb-v", (2, 2, 2, 2)),
]
MICROBATCHES = (4, 12)
TURN = 0.4
"""Seconds for which a pipeline steps in a round, at least one step."""


@dataclass
class Point:
    """One pipeline: what it should take, and what a step took on average in each round."""

    schedule: str
    sizes: tuple[int, ...]
    pipe: sl.Pipeline
    batch: Tensor
    measured: list[float]

    @property
    def name(self) -> str:
        return f"{self.schedule} {'+'.join(map(str, self.sizes))}"

    def run(self, steps: int) -> None:
        took = 0.0
        for _ in range(steps):
            self.pipe.zero_grad()
            start = time.perf_counter()
            self.pipe.step(self.batch, target=self.batch)
            took += time.perf_counter() - start
        self.measured.append(took / steps)

    def steps(self) -> int:
        """Return how many steps a turn has, by the first turn."""
        if not self.measured:
            self.run(2)
        return math.ceil(TURN / self.measured[0])

    def predicted(self, costs: Sequence[sl.ModelCosts], device: sl.Device) -> float:
        """Simulate a step; a stage takes what its own process measured."""
        schedule = self.pipe.schedule
        each = [one.placed(self.sizes, schedule.placement, device) for one in costs]
        stages = list(enumerate(schedule.placement))
        own = {name: [getattr(each[rank], name)[stage] for stage, rank in stages] for name in TIMES}
        found = sl.simulate(schedule, replace(each[0], **own))
        return float(found.T) / 1e9 + device.agreement


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def points_of(case: Case, model: nn.Module, counts: Sequence[int]) -> Iterator[Point]:
    example = torch.randn(*case.shape)
    for count in counts:
        batch = torch.randn(case.shape[0] * count, *case.shape[1:])
        for schedule, sizes in WAYS:
            pipe = sl.Pipeline(
                model,
                example_args=(example,),
                split=list(sizes),
                schedule=schedule,
                num_microbatches=count,
                loss_fn=loss_fn,
            )
            yield Point(schedule, sizes, pipe, batch, [])


def from_all_ranks(costs: sl.ModelCosts) -> list[sl.ModelCosts]:
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, costs.to_json())
    return [sl.ModelCosts.from_json(text) for text in texts]


Measurement = list[sl.ModelCosts]
"""What each process measured, all at the same time."""

Rounds = list[tuple[Measurement, Measurement]]
"""What was measured before and after each round."""


def run(case: Case, counts: Sequence[int], rounds: int) -> tuple[list[Point], Rounds]:
    """Measure blocks and steps in turn; return the steps, and the costs around each round.

    So load that comes and goes is in both.
    """
    torch.manual_seed(0)
    model, example = case.make(), torch.randn(*case.shape)
    graph = sl.capture(model, (example,))
    points = list(points_of(case, model, counts))
    order, found = random.Random(0), []
    steps = [point.steps() for point in points]
    dist.broadcast_object_list(steps)
    for number in range(rounds + 1):
        dist.barrier()
        costs = sl.measure_costs(graph, repeats=2, loss_fn=loss_fn, target=example, progress=False)
        found.append(from_all_ranks(costs))
        if number < rounds:
            for at in order.sample(range(len(points)), len(points)):
                points[at].run(steps[at])
    for point in points:
        del point.measured[0]  # it warmed up
    return points, list(pairwise(found))


def by_count(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points that have the same number of microbatches, together."""
    counts = sorted({point.pipe.schedule.num_microbatches for point in points})
    return [[p for p in points if p.pipe.schedule.num_microbatches == count] for count in counts]


@dataclass(frozen=True)
class Verdict:
    """What a point was predicted to take and what it took, as the median over the rounds."""

    point: Point
    predicted: float
    measured: float
    error: float
    share: float

    @classmethod
    def of(cls, point: Point, costs: Rounds, together: Sequence[float]) -> Verdict:
        """Compare round by round: the machine's speed changes between them.

        Args:
            point: The pipeline.
            costs: What was measured before and after each round.
            together: The average step of all pipelines that are compared, in each round.
        """
        device = sl.Device.named("cpu")
        guesses = [
            statistics.mean(point.predicted(each, device) for each in pair) for pair in costs
        ]
        rounds = list(zip(guesses, point.measured, together, strict=True))
        return cls(
            point=point,
            predicted=statistics.median(guesses),
            measured=statistics.median(point.measured),
            error=statistics.median(guess / truth - 1 for guess, truth, _ in rounds),
            share=statistics.median(truth / all_ for _, truth, all_ in rounds),
        )

    def line(self, name: str) -> str:
        count = self.point.pipe.schedule.num_microbatches
        figures = f"{1e3 * self.predicted:.1f} | {1e3 * self.measured:.1f} | {self.error:+.1%}"
        return f"| {name} | {count} | {self.point.name} | {figures} |"


def verdicts(points: Sequence[Point], costs: Rounds) -> list[Verdict]:
    together = [statistics.mean(each) for each in zip(*(p.measured for p in points), strict=True)]
    return [Verdict.of(point, costs, together) for point in points]


def choice(found: Sequence[Verdict], pairs: int) -> float:
    """Return by how much the predicted best is slower than the measured best.

    The two run once more, in turns: of seven figures with errors the least is too small.
    """
    predicted = min(range(len(found)), key=lambda at: found[at].predicted)
    measured = min(range(len(found)), key=lambda at: found[at].share)
    chosen = [predicted, measured]
    dist.broadcast_object_list(chosen)  # clocks differ
    if chosen[0] == chosen[1]:
        return 0.0
    ours, best = (found[at].point for at in chosen)
    for each in (ours, best):
        each.measured.clear()
    steps = [ours.steps(), best.steps()]
    dist.broadcast_object_list(steps)
    for number in range(pairs):
        turns = [(ours, steps[0]), (best, steps[1])]
        for point, count in turns if number % 2 else reversed(turns):
            point.run(count)
    ratios = (a / b for a, b in zip(ours.measured[1:], best.measured[1:], strict=True))
    return statistics.median(ratios) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one model, one m, fewer rounds")
    parser.add_argument("--model", choices=[case.name for case in CASES], help="one model")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(subprocess.call([*TORCHRUN, __file__, *sys.argv[1:]]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    says = dist.get_rank() == 0
    if says:
        print("| model | m | schedule, blocks of the stages | predicted ms | measured ms | error |")
        print("|---|---|---|---|---|---|")
    errors: list[float] = []
    slower: list[float] = []
    cases = [case for case in CASES if arguments.model in (None, case.name)]
    for case in cases[: 1 if arguments.short else None]:
        counts = MICROBATCHES[:1] if arguments.short else MICROBATCHES
        points, costs = run(case, counts, 2 if arguments.short else 12)
        for group in by_count(points):
            found = verdicts(group, costs)
            errors += [each.error for each in found]
            slower.append(choice(found, 4 if arguments.short else 25))
            if says:
                print("\n".join(each.line(case.name) for each in found), flush=True)
        for point in points:
            point.pipe.close()
    if says:
        print(f"\n{len(errors)} points; median error {statistics.median(map(abs, errors)):.1%}")
        by = ", ".join(f"{loss:.1%}" for loss in slower)
        print(f"the predicted best of a model and an m is slower than the measured best by {by}")


if __name__ == "__main__":
    main()
