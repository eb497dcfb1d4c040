"""How many actions a second does the simulator do? See README.md."""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from stageline.scheduling import Costs, Schedule, schedules, simulate
from stageline.scheduling.kernels import Problem, plain, solve
from stageline.scheduling.times import Times
from stageline.scheduling.work import Work

CASES = [
    ("1f1b", 8, 32),
    ("1f1b", 8, 20_000),
    ("1f1b", 16, 10_000),
    ("1f1b", 32, 4_000),
    ("1f1b", 64, 4_000),
    ("1f1b", 256, 4_000),
    ("gpipe", 64, 4_000),
    ("sequential", 64, 4_000),
]
LARGE = ("1f1b", 1024, 8192)
COSTS = Costs(forward=18522, input_gradient=18086, weight_gradient=9337, latency=601)


def contestants(schedule: Schedule) -> dict[str, Callable[[], object]]:
    """Return the whole simulation, its inner loop, and the plain form of that loop twice."""
    work = Work.of(schedule)
    times = Times.of(work, COSTS)
    problem = Problem(work.bounds, work.ranks, work.waits, times.lag, times.duration)
    return {
        "simulate": lambda: simulate(schedule, COSTS),
        "loop": lambda: solve(problem),
        "plain": lambda: plain(problem),
        "again": lambda: plain(problem),
    }


def measure(name: str, num_ranks: int, num_microbatches: int, rounds: int) -> None:
    schedule = schedules.build(name, num_ranks, num_microbatches)
    functions = contestants(schedule)
    seconds: dict[str, list[float]] = {each: [] for each in functions}
    for _ in range(rounds):
        for each in random.sample(list(functions), len(functions)):
            begin = time.process_time()
            functions[each]()
            seconds[each].append(time.process_time() - begin)
    median = {each: statistics.median(times) for each, times in seconds.items()}
    rates = [f"{len(schedule) / median[each] / 1e6:.2f}" for each in ("simulate", "loop", "plain")]
    cells = [
        f"{name} {num_ranks} x {num_microbatches}",
        str(len(schedule)),
        *rates,
        f"{median['plain'] / median['loop']:.2f}",
        f"{median['again'] / median['plain']:.2f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def large() -> None:
    """Build and simulate the large schedule in a process of its own; print time and memory."""
    begin, cpu = time.perf_counter(), time.process_time()
    schedule = schedules.build(*LARGE)
    built = time.perf_counter()
    simulation = simulate(schedule, COSTS)
    end = time.perf_counter()
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{LARGE[0]} {LARGE[1]} x {LARGE[2]}, {len(schedule)} actions: built in "
        f"{built - begin:.1f} s, simulated in {end - built:.1f} s, together {end - begin:.1f} s "
        f"({time.process_time() - cpu:.1f} s of CPU), peak memory {gigabytes:.2f} GiB, "
        f"T = {simulation.T}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer rounds, the first cases only")
    parser.add_argument("--large", action="store_true", help="only the large case, in this process")
    arguments = parser.parse_args()
    if arguments.large:
        large()
        return
    print(
        "| schedule, ranks x microbatches | actions | simulate, M/s | loop | plain loop | x | A/A |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, num_ranks, num_microbatches in CASES[:2] if arguments.short else CASES:
        measure(name, num_ranks, num_microbatches, 3 if arguments.short else 9)
    if not arguments.short:
        subprocess.run([sys.executable, __file__, "--large"], check=True)


if __name__ == "__main__":
    main()
