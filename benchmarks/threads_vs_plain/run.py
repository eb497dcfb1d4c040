"""Is a pipeline of threads faster than the plain model on one thread? See README.md."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import stageline as sl


@dataclass(frozen=True)
class Case:
    """A stack of Linear and ReLU layers, and the batch it is trained on."""

    width: int
    rows_per_microbatch: int
    num_microbatches: int
    layers: int = 8

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers = [(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers)]
        return nn.Sequential(*(layer for pair in layers for layer in pair))


ROUNDS = 25
CASES = [Case(64, 8, 8), Case(256, 32, 16), Case(1024, 256, 16)]


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def contestants(case: Case) -> dict[str, Callable[[], object]]:
    """Return the plain loop twice, as A and A, and the pipeline: all on the same microbatches."""
    rows = case.rows_per_microbatch * case.num_microbatches
    x, y = torch.randn(rows, case.width), torch.randn(rows, case.width)
    parts = list(
        zip(
            x.tensor_split(case.num_microbatches),
            y.tensor_split(case.num_microbatches),
            strict=True,
        )
    )
    plain = case.model()
    pipe = sl.Pipeline(
        case.model(),
        split=[case.layers, case.layers],
        num_microbatches=case.num_microbatches,
        loss_fn=F.mse_loss,
    )

    def loop() -> None:
        for inputs, target in parts:
            (F.mse_loss(plain(inputs), target) / case.num_microbatches).backward()

    return {"plain": loop, "plain again": loop, "pipeline": lambda: pipe.step(x, target=y)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="without the widest model")
    # Fewer rounds would show a pipeline that still finds out which of its two ways is faster.
    cases = CASES[:-1] if parser.parse_args().short else CASES
    torch.set_num_threads(1)
    random.seed(0)
    print("| width | rows x microbatches | plain ms | A/A | pipeline ms | plain / pipeline |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        racing = contestants(case)
        times: dict[str, list[float]] = {name: [] for name in racing}
        order = list(racing)
        for _ in range(ROUNDS + 1):  # the first round warms up
            random.shuffle(order)  # who runs after whom matters: caches, sleeping threads
            for name in order:
                times[name].append(1000 * seconds(racing[name]))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        print(
            f"| {case.width} | {case.rows_per_microbatch} x {case.num_microbatches} "
            f"| {medians['plain']:.2f} | {medians['plain again'] / medians['plain']:.2f} "
            f"| {medians['pipeline']:.2f} | {medians['plain'] / medians['pipeline']:.2f} |"
        )


if __name__ == "__main__":
    main()
