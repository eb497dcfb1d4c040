"""What does one hop between ranks cost, and a small step? See README.md.

torchrun --standalone --nproc-per-node 2 benchmarks/transports/run.py [--short]
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count

import torch
from torch import nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.boundary import Packet
from stageline.running.control import Member
from stageline.running.settings import Settings
from stageline.running.transports.base import Edge, Endpoint, ProcessTransport
from stageline.running.transports.memory import MemoryTransport
from stageline.running.transports.process_group import ProcessGroupTransport
from stageline.running.transports.shared_memory import SharedMemoryTransport
from stageline.running.workers import WorkerPool
from stageline.running.world import World

SIZES = {"2 KiB": 1 << 11, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
HOPS = 20  # of a sample: there and back so many times
NAMES = ("memory", "shared-memory", "process-group")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def edge(number: int, source: int, letter: str) -> Edge:
    return Edge(source, 1 - source, letter, number, source, 1 - source)


def echo(rank: int, endpoint: Endpoint, tensor: torch.Tensor, numbers: range) -> float:
    """Send a tensor there and back; return microseconds per hop."""
    start = time.perf_counter()
    for number in numbers:
        if rank == 0:
            endpoint.send(edge(number, 0, "F"), Packet([tensor], None, (True,)))
            endpoint.receive(edge(number, 1, "B")).wait()
        else:
            packet = endpoint.receive(edge(number, 0, "F")).wait()
            endpoint.send(edge(number, 1, "B"), packet)
    return (time.perf_counter() - start) / len(numbers) / 2 * 1e6


class Hops:
    """One hop over each transport; rank 0 measures."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._carriers: dict[str, ProcessTransport] = {
            "shared-memory": SharedMemoryTransport(member),
            "process-group": ProcessGroupTransport(member),
        }
        self._pool = WorkerPool(2)
        self._numbers = count()

    def measure(self, name: str, tensor: torch.Tensor) -> float:
        start = next(self._numbers) * HOPS
        numbers = range(start, start + HOPS)
        if name == "memory":
            return self._in_threads(tensor, numbers) if self._member.rank == 0 else 0.0
        endpoint = self._carriers[name].open(epoch=0, window=None)
        return echo(self._member.rank, endpoint, tensor, numbers)

    def _in_threads(self, tensor: torch.Tensor, numbers: range) -> float:
        exchange = MemoryTransport().open(2, window=None)
        found: list[float] = []

        def act(rank: int) -> None:
            found.append(echo(rank, exchange.endpoint(rank), tensor, numbers))

        self._pool.run([lambda: act(0), lambda: act(1)], on_failure=exchange.abort)
        return max(found)

    def close(self) -> None:
        self._pool.close()
        for carrier in self._carriers.values():
            carrier.close()


def pipelines() -> dict[str, Callable[[], object]]:
    """Return a step of a tiny pipeline over each transport."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 64), torch.randn(64, 64)

    def step_of(name: str) -> Callable[[], object]:
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
        pipe = sl.Pipeline(
            nn.Sequential(*layers),
            split=[8, 8],
            num_microbatches=8,
            schedule="1f1b",
            loss_fn=F.mse_loss,
            transport=name,
        )
        return lambda: pipe.step(x, target=y)

    return {name: step_of(name) for name in NAMES}


def interleaved(
    racing: dict[str, Callable[[], float]], rounds: int, shuffle: random.Random
) -> dict[str, float]:
    """Return the median of each contestant; ranks shuffle alike, so that they meet."""
    found: dict[str, list[float]] = {name: [] for name in racing}
    order = list(racing)
    for _ in range(rounds + 1):  # the first round warms up
        shuffle.shuffle(order)
        for name in order:
            found[name].append(racing[name]())
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def timed(step: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat * 1e6


def row(what: str, medians: dict[str, float]) -> str:
    return f"| {what} | " + " | ".join(f"{medians[name]:.0f}" for name in NAMES) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    rounds = 3 if parser.parse_args().short else 31
    torch.set_num_threads(1)
    shuffle = random.Random(0)
    world = World.find()
    if world is None:
        sys.exit(subprocess.call([*TORCHRUN, *sys.argv]))
    member = Settings(timeout=60).join(world)
    assert member is not None
    member.next_call()
    hops, lines = Hops(member), []
    for what, size in SIZES.items():
        tensor = torch.ones(size // 4)
        racing = {name: lambda name=name, t=tensor: hops.measure(name, t) for name in NAMES}
        lines.append(row(f"one hop, {what}", interleaved(racing, rounds, shuffle)))
    steps = pipelines()
    step_race = {
        # While threads run on rank 0, the other process sleeps.
        name: (lambda name=name: timed(steps[name], 10))
        if world.rank == 0 or name != "memory"
        else (lambda: 0.0)
        for name in NAMES
    }
    lines.append(row("one step, 8 microbatches", interleaved(step_race, rounds, shuffle)))
    if world.rank == 0:
        print("| microseconds | " + " | ".join(NAMES) + " |")
        print("|---|---|---|---|")
        print("\n".join(lines))
    hops.close()


if __name__ == "__main__":
    main()
