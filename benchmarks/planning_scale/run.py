"""What does the simulator say of large pipelines, and how long does a plan take? See README.md."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

from stageline.errors import ScheduleError
from stageline.partitioning.costs import BlockCosts, ModelCosts
from stageline.partitioning.device import Device
from stageline.planning import propose
from stageline.planning.bounds import least_time
from stageline.planning.candidates import AUTO, Candidate, Method
from stageline.planning.searching import find_schedule
from stageline.scheduling import Costs, Schedule, Simulation, schedules, simulate

RANKS = (8, 64, 512, 4096)
MOST_SHORT = 64
NAMES = ("1f1b", "interleaved", "zb-v", "dualpipe-v", AUTO)
ACTIONS = {"1f1b": 2, "interleaved": 4, "zb-v": 6, "dualpipe-v": 5, AUTO: 6}
"""For each rank and microbatch."""
BYTES = {"dualpipe-v": 105}
"""For each action: rows, waits and times, as measured with 1,024 ranks; 60 without pairs."""
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """Times of a rank's share of the model for one microbatch, and of a hop, in any unit."""

    title: str
    forward: int
    input_gradient: int
    weight_gradient: int
    latency: int

    def costs(self, stages_per_rank: int) -> Costs:
        """Return the same for each stage of a rank."""
        each = (self.forward, self.input_gradient, self.weight_gradient)
        forward, inputs, weights = (time // stages_per_rank for time in each)
        return Costs(
            forward=forward,
            input_gradient=inputs,
            weight_gradient=weights,
            latency=self.latency,
        )


SETTINGS = (
    Setting("F = I = W = 1000, hop 10", 1000, 1000, 1000, 10),
    Setting("F 18522, I 18086, W 9337, hop 601", 18522, 18086, 9337, 601),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--schedules", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--most-gib", type=float, default=12.0, help="memory for a simulation")
    parser.add_argument("--plan-only", action="store_true", help="time find_plans alone")
    parser.add_argument("--short", action="store_true", help="nothing large, no search, no plan")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.ranks = [ranks for ranks in arguments.ranks if ranks <= MOST_SHORT]
        arguments.schedules = [name for name in arguments.schedules if name != AUTO]
    if not arguments.plan_only:
        for setting in SETTINGS[:1] if arguments.short else SETTINGS:
            print(f"\n{setting.title}; m = 2p\n")
            print("| ranks | schedule | T / work | bubble | span bubble | peak | actions | s |")
            print("|---|---|---|---|---|---|---|---|")
            for ranks in arguments.ranks:
                for name in arguments.schedules:
                    print(row(name, ranks, setting, arguments), flush=True)
    for line in () if arguments.short else planned():
        print(line, flush=True)


def row(name: str, ranks: int, setting: Setting, arguments: argparse.Namespace) -> str:
    """Return a line of the table; or why there is none."""
    count = 2 * ranks
    needed = BYTES.get(name, 60) * ACTIONS[name] * ranks * count / GIB
    if needed > arguments.most_gib:
        return f"| {ranks:,} | {name} | not simulated: needs about {needed:.0f} GiB | | | | | |"
    begin = time.perf_counter()
    try:
        simulation = simulated(name, ranks, count, setting)
    except ScheduleError as error:
        return f"| {ranks} | {name} | {error} | | | | | |"
    took = time.perf_counter() - begin
    work = count * (setting.forward + setting.input_gradient + setting.weight_gradient)
    cells = (
        f"{float(simulation.T) / work:.3f}",
        f"{100 * float(simulation.bubble):.1f} %",
        f"{100 * float(simulation.span_bubble):.1f} %",
        f"{float(max(simulation.peak_activations)):g}",
        f"{len(simulation.schedule):,}",
        f"{took:.1f}",
    )
    return f"| {ranks:,} | {name} | {' | '.join(cells)} |"


def simulated(name: str, ranks: int, count: int, setting: Setting) -> Simulation:
    if name == AUTO:
        return searched(ranks, count, setting)
    family = schedules.family(name)
    schedule: Schedule = schedules.build(name, family.num_stages(ranks), count, num_ranks=ranks)
    return simulate(schedule, setting.costs(family.stages_per_rank))


def searched(ranks: int, count: int, setting: Setting) -> Simulation:
    """Return the best of what is found with one stage per rank and with two, in any placement."""
    two = find_schedule(ranks, count, setting.costs(2), num_stages=2 * ranks).simulation
    straight = Candidate(Method(AUTO), 1, ranks, count, rows=1)
    if least_time(straight, setting.costs(1)) >= two.T:
        return two  # whatever the order, one stage per rank takes longer
    one = find_schedule(ranks, count, setting.costs(1)).simulation
    return min(two, one, key=lambda found: found.T)


def planned() -> Iterator[str]:
    """Yield how long a plan takes: 100 layers on 1,024 ranks."""
    layers, ranks, batch = 100, 1024, 4096
    begin = time.perf_counter()
    found = propose(
        transformer(layers),
        ranks=ranks,
        batch_size=batch,
        device=Device.named("H100"),
        data_parallel="auto",
    )
    took = time.perf_counter() - begin
    yield f"\n{layers} layers, {ranks:,} ranks, a batch of {batch:,} rows: {took:.1f} s"
    yield f"{found.num_candidates} candidates, {found.num_simulated} simulations\n"
    yield found.table()


def transformer(layers: int, *, width: int = 8192, tokens: int = 4096) -> ModelCosts:
    """Return a decoder in bfloat16 with one row per microbatch, by its arithmetic."""
    speed = Device.named("H100").speed("bfloat16")
    weights = 12 * width * width
    kept = 34 * tokens * width

    def block(name: str, numbers: int, activations: int, output: int) -> BlockCosts:
        forward = round(1e9 * 2 * numbers * tokens / speed)
        return BlockCosts(
            name,
            forward=forward,
            input_gradient=forward,
            weight_gradient=forward,
            backward=2 * forward,
            input_bytes=2 * tokens * width,
            activation_bytes=activations,
            input_gradient_frees=activations // 4,
            parameters=numbers,
            parameter_bytes=2 * numbers,
            output_bytes=output,
        )

    edge = 2 * tokens * width
    middle = [block(f"layer {index}", weights, kept, edge) for index in range(layers)]
    head = block("head", width * 32_000, 2 * tokens * 32_000, 0)
    return ModelCosts((*middle, head), rows=1, origin="arithmetic of a decoder on an H100")


if __name__ == "__main__":
    main()
