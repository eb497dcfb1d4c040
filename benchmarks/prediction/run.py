"""How far is a predicted step from the measured one? See README.md.

torchrun --standalone --nproc-per-node 2 benchmarks/prediction/run.py [--short] [--model NAME]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.partitioning.costs import TIMES

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Layer(nn.Module):
    """A causal Transformer layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.queries(self.norm(x)).view(rows, length, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(x.shape)), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


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


@dataclass
class Point:
    """One pipeline: what it should take, and what it took."""

    schedule: str
    sizes: tuple[int, ...]
    pipe: sl.Pipeline
    batch: Tensor
    measured: list[float]

    @property
    def name(self) -> str:
        return f"{self.schedule} {'+'.join(map(str, self.sizes))}"

    def step(self) -> None:
        self.pipe.zero_grad()
        start = time.perf_counter()
        self.pipe.step(self.batch, target=self.batch)
        self.measured.append(time.perf_counter() - start)

    def predicted(self, costs: sl.ModelCosts, device: sl.Device) -> float:
        schedule = self.pipe.schedule
        found = sl.simulate(schedule, costs.placed(self.sizes, schedule.placement, device))
        return float(found.T) / 1e9


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


def average(found: Sequence[sl.ModelCosts]) -> sl.ModelCosts:
    """Return the average of costs that were measured several times."""

    def mean(same: Sequence[Any]) -> Any:
        times = {name: round(statistics.mean(getattr(one, name) for one in same)) for name in TIMES}
        return replace(same[0], **times)

    blocks = tuple(map(mean, zip(*(costs.blocks for costs in found), strict=True)))
    return replace(found[0], blocks=blocks, boundary=mean([costs.boundary for costs in found]))


def from_all_ranks(costs: sl.ModelCosts) -> list[sl.ModelCosts]:
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, costs.to_json())
    return [sl.ModelCosts.from_json(text) for text in texts]


def run(case: Case, counts: Sequence[int], rounds: int) -> tuple[list[Point], list[sl.ModelCosts]]:
    """Measure blocks and steps in turn; return the steps, and the costs around each round.

    So load that comes and goes is in both.
    """
    torch.manual_seed(0)
    model, example = case.make(), torch.randn(*case.shape)
    graph = sl.capture(model, (example,))
    points = list(points_of(case, model, counts))
    order, found = random.Random(0), []
    for number in range(rounds + 2):
        dist.barrier()
        costs = sl.measure_costs(graph, repeats=2, loss_fn=loss_fn, target=example, progress=False)
        if number:
            found.append(average(from_all_ranks(costs)))
        if number <= rounds:
            for point in order.sample(points, len(points)):
                point.step()
    for point in points:
        del point.measured[0]  # the first round warms up
    return points, [average(pair) for pair in pairwise(found)]


def report(
    name: str, points: Sequence[Point], costs: Sequence[sl.ModelCosts]
) -> tuple[list[float], list[float]]:
    """Print the points of a model; return the errors, and what trusting the choices would cost."""
    device = sl.Device.named("cpu")
    errors, losses = [], []
    for count in sorted({point.pipe.schedule.num_microbatches for point in points}):
        group = [p for p in points if p.pipe.schedule.num_microbatches == count]
        predicted = [[point.predicted(each, device) for each in costs] for point in group]
        together = [
            statistics.mean(times) for times in zip(*(p.measured for p in group), strict=True)
        ]
        shares = []
        for point, guesses in zip(group, predicted, strict=True):
            pairs = list(zip(guesses, point.measured, strict=True))
            errors.append(statistics.median(guess / truth - 1 for guess, truth in pairs))
            shares.append(
                statistics.median(m / t for m, t in zip(point.measured, together, strict=True))
            )
            guess, truth = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
            print(
                f"| {name} | {count} | {point.name} | {guess:.1f} | {truth:.1f} "
                f"| {errors[-1]:+.1%} |"
            )
        medians = [statistics.median(guesses) for guesses in predicted]
        losses.append(shares[medians.index(min(medians))] / min(shares) - 1)
    return errors, losses


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
    losses: list[float] = []
    cases = [case for case in CASES if arguments.model in (None, case.name)]
    for case in cases[: 1 if arguments.short else None]:
        counts = MICROBATCHES[:1] if arguments.short else MICROBATCHES
        points, costs = run(case, counts, 2 if arguments.short else 12)
        if says:
            more, worse = report(case.name, points, costs)
            errors, losses = errors + more, losses + worse
        for point in points:
            point.pipe.close()
    if says:
        print(f"\n{len(errors)} points; median error {statistics.median(map(abs, errors)):.1%}")
        slower = ", ".join(f"{loss:.1%}" for loss in losses)
        print(
            f"the predicted best of a model and an m is slower than the measured best by {slower}"
        )


if __name__ == "__main__":
    main()
