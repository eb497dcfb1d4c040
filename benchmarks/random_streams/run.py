"""What do random streams cost, where something is drawn and where nothing is? See README.md."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stageline.capturing.streams.tracking import numbers_of
from stageline.running.streams.calls import CallStreams, StageStreams
from stageline.running.streams.candidates import Candidates
from stageline.torch_private import run_backward


@dataclass(frozen=True)
class Case:
    """A module, and one microbatch for it."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def encoder_layer(p: float) -> nn.Module:
    return nn.TransformerEncoderLayer(256, 4, 1024, dropout=p, batch_first=True)


def mlp(p: float) -> nn.Module:
    layers = [(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(p)) for _ in range(4)]
    return nn.Sequential(*(layer for triple in layers for layer in triple))


CASES = [
    Case("TransformerEncoderLayer, width 256, p = 0.1", lambda: encoder_layer(0.1), (4, 128, 256)),
    Case("TransformerEncoderLayer, width 256, p = 0", lambda: encoder_layer(0.0), (4, 128, 256)),
    Case("4 x Linear, ReLU, Dropout, width 64, p = 0.1", lambda: mlp(0.1), (8, 64)),
    Case("4 x Linear, ReLU, Dropout, width 64, p = 0", lambda: mlp(0.0), (8, 64)),
]


def contestants(case: Case) -> dict[str, Callable[[], object]]:
    """Return forward and backward of one microbatch: plainly, plainly again, and in streams."""
    torch.manual_seed(0)
    module, x = case.make(), torch.randn(*case.shape)
    found = Candidates.among(module.modules())
    stage = StageStreams(numbers_of(module), None, lambda: found)
    drawing = {0: stage} if found.may_draw() else {}
    streams = CallStreams(drawing, loss_draws=False, seed=0, kind="TRAIN", number=0)
    gradient = torch.ones(case.shape)

    def backward(output: Tensor) -> None:
        run_backward([output], [gradient])

    def plain() -> None:
        backward(module(x))

    def streamed() -> None:
        with streams.forward(0, 0):
            output = module(x)
        with streams.backward(0, 0):
            backward(output)

    def in_streams() -> None:
        if not drawing:  # as a pipeline does: nothing is entered, nothing is replaced
            streamed()
            return
        with streams.installed():
            streamed()

    return {"plain": plain, "again": plain, "streams": in_streams}


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of this thread: other programs may share the cores."""
    start = time.thread_time()
    for _ in range(repeats):
        function()
    return (time.thread_time() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    rounds = 15 if parser.parse_args().short else 75
    torch.set_num_threads(1)
    random.seed(0)
    print("| module | plain ms | A/A | streams ms | streams / plain |")
    print("|---|---|---|---|---|")
    for case in CASES:
        racing = contestants(case)
        times: dict[str, list[float]] = {name: [] for name in racing}
        repeats = 1 if len(case.shape) > 2 else 20
        for _ in range(rounds):
            for name in random.sample(list(racing), len(racing)):
                times[name].append(seconds(racing[name], repeats))
        plain, again, streams = (1000 * statistics.median(times[name]) for name in racing)
        ratio = f"{again / plain:.3f} | {streams:.3f} | {streams / plain:.3f}"
        print(f"| {case.name} | {plain:.3f} | {ratio} |")


if __name__ == "__main__":
    main()
