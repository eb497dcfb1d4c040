"""What does a backward in two halves cost, and what is held in between? See README.md."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from stageline.observing import measure_memory
from stageline.running.allocator import keep_freed_memory
from stageline.running.boundary import Packet, enter, leave
from stageline.running.split.deferred import Deferred
from stageline.running.split.mode import Splitting, splittable_parameters
from stageline.torch_private import run_backward


@dataclass(frozen=True)
class Case:
    """A stage in the middle of a pipeline, and one microbatch for it."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    repeats: int = 1


def layer(activation: str, dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(
        256, 4, 1024, dropout=dropout, activation=activation, batch_first=True
    )


def stack(width: int, activation: Callable[[], nn.Module] = nn.Identity) -> nn.Module:
    layers = [(nn.Linear(width, width), activation()) for _ in range(8)]
    return nn.Sequential(*(part for pair in layers for part in pair))


TIMED = [
    Case(
        "TransformerEncoderLayer, width 256, 4 x 128 tokens", lambda: layer("relu"), (4, 128, 256)
    ),
    Case("8 Linear, width 512, 256 rows", lambda: stack(512), (256, 512)),
    Case("8 Linear, width 64, 8 rows", lambda: stack(64), (8, 64), repeats=20),
]
HELD = [
    TIMED[0],
    Case("the same with GELU, dropout 0.1", lambda: layer("gelu", 0.1), (4, 128, 256)),
    TIMED[1],
    Case("8 Linear and GELU, width 512, 256 rows", lambda: stack(512, nn.GELU), (256, 512)),
]


class Race:
    """A rank in the middle of a pipeline: some forwards ahead, then one backward, one forward.

    That is how 1F1B and ZB-H1 run, and memory is taken and given back as there. What counts is the
    CPU time of this thread, for other programs may share the cores.
    """

    AHEAD, MICROBATCHES = 3, 8

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.module, self.x = case.make(), torch.randn(*case.shape)
        self.leaves = splittable_parameters(self.module)
        self.times: dict[str, list[float]] = {}
        self.spent: dict[str, float] = {}

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.thread_time() - start

    def forward(self, splits: bool) -> Any:
        entered, deferred = enter(Packet([self.x.clone()], None, (True,))), Deferred()
        with Splitting(self.leaves, deferred) if splits else nullcontext():
            packet, roots = leave(self.module(entered.value))
        return roots, [torch.ones_like(packet.leaves[0])], entered.slot, deferred

    def step(self, suffix: str = "", *, splits: bool = False) -> None:
        """Run the microbatches of a step, in one piece or in two."""
        self.spent = {}
        ahead: deque[Any] = deque()
        for number in range(self.MICROBATCHES + self.AHEAD):
            if number < self.MICROBATCHES:
                with self.clock("F split" if splits else "F" + suffix):
                    ahead.append(self.forward(splits))
            if number >= self.AHEAD:
                self.backward(*ahead.popleft(), suffix, splits)
        for name, spent in self.spent.items():
            self.times.setdefault(name, []).append(spent / self.MICROBATCHES)

    def backward(
        self, roots: Any, gradient: Any, slot: Any, deferred: Deferred, suffix: str, splits: bool
    ) -> None:
        slot.is_open = deferred.is_open = True
        with self.clock("I" if splits else "B" + suffix):
            run_backward(roots, gradient)
        roots.clear()
        gradient.clear()
        slot.gradients = ()
        if splits:
            with self.clock("W"):
                deferred.run()

    def run(self, rounds: int, repeats: int) -> dict[str, float]:
        contestants = [self.step, partial(self.step, " again"), partial(self.step, splits=True)]
        for number in range(rounds + 2):
            if number == 2:
                self.times.clear()  # the first rounds warm up
            for contestant in random.sample(contestants, len(contestants)):
                for _ in range(repeats):
                    contestant()
        return {name: 1000 * statistics.median(times) for name, times in self.times.items()}

    def ratio(self, over: Sequence[str], under: Sequence[str]) -> float:
        """Return the median of a ratio, taken in every round: load that comes and goes cancels."""
        sums = [
            [sum(parts) for parts in zip(*(self.times[name] for name in names), strict=True)]
            for names in (over, under)
        ]
        return statistics.median(a / b for a, b in zip(*sums, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    rounds = 3 if parser.parse_args().short else 40
    torch.set_num_threads(1)
    keep_freed_memory()  # as every pipeline does
    random.seed(0)
    print("| stage | B ms | A/A | I ms | W ms | (I + W) / B | F split / F |")
    print("|---|---|---|---|---|---|---|")
    for case in TIMED:
        race = Race(case)
        ms = race.run(rounds, case.repeats)
        aa, ratio = race.ratio(["B again"], ["B"]), race.ratio(["I", "W"], ["B"])
        halves = (
            f"{ms['I']:.3f} | {ms['W']:.3f} | {ratio:.3f} | {race.ratio(['F split'], ['F']):.2f}"
        )
        print(f"| {case.name} | {ms['B']:.3f} | {aa:.3f} | {halves} |")
    print()
    print("| stage | MiB after F | after I | after W | released by I |")
    print("|---|---|---|---|---|")
    for case in HELD:
        memory = measure_memory(
            [nn.Linear(case.shape[-1], case.shape[-1]), case.make()], torch.randn(*case.shape)
        )[1]
        held = (memory.after_forward, memory.after_input_gradient, memory.after_weight_gradient)
        f, i, w = (f"{size / 2**20:.1f}" for size in held)
        print(f"| {case.name} | {f} | {i} | {w} | {memory.released_by_i:.0%} |")


if __name__ == "__main__":
    main()
