"""What does each mode of recompute cost in time and save in memory? See README.md."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports each start and stop

import torch

import stageline as sl
from benchmarks.recompute.modes import GROUPS, RANKS, Answer, Contestant, Work, measure
from benchmarks.tools.pages import Setting, table, write
from benchmarks.tools.ranks import Ranks
from stageline.partitioning.costs import TIMES
from stageline.scheduling.costs import Number
from stageline.scheduling.simulator import Simulation

HERE = Path(__file__).resolve().parent
WORK = Work(width=256, length=64, num_layers=8, rows=2, num_microbatches=8, rounds=12, repeats=4)
SHORT = replace(WORK, width=64, num_layers=4, num_microbatches=4, rounds=2, repeats=1)
MIB = 2**20
PATIENCE = 1200.0  # seconds for one group, on a machine that others use too
HEAD = [
    "schedule",
    "recompute",
    "activations: simulator",
    "counted",
    "MiB: simulator",
    "held",
    "while an action runs",
    "time: simulator",
    "measured",
]


class Forecast:
    """What the simulator says, told what the blocks of each process cost."""

    def __init__(self, answers: Sequence[Answer], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._rounds = [
            [sl.ModelCosts.from_json(answer.costs[number]) for answer in answers]
            for number in range(len(answers[0].costs))
        ]
        self._device = sl.Device.named("cpu")

    def simulations(self, rows: str) -> list[Simulation]:
        """Return one for each time that the blocks were measured."""
        schedule = sl.parse(rows)
        return [sl.simulate(schedule, self._costs(each, schedule)) for each in self._rounds]

    def seconds(self, rows: str) -> float:
        times = [float(each.T) / 1e9 for each in self.simulations(rows)]
        return statistics.mean(times) + self._device.agreement

    def _costs(self, costs: Sequence[sl.ModelCosts], schedule: sl.Schedule) -> sl.Costs:
        """A stage takes what its own process has measured."""
        placement = schedule.placement
        each = [one.placed(self._sizes, placement, self._device) for one in costs]
        own: dict[str, Any] = {
            name: [getattr(each[rank], name)[stage] for stage, rank in enumerate(placement)]
            for name in TIMES
        }
        return replace(each[0], **own)


def lines(
    group: Sequence[Contestant], answers: Sequence[Answer], sizes: Sequence[int]
) -> list[list[str]]:
    """Return the rows of some contestants for the table."""
    forecast, first = Forecast(answers, sizes), answers[0]
    base = forecast.seconds(first.rows[0])
    milliseconds = 1e3 * statistics.median(first.seconds[0])
    found = []
    for index, contestant in enumerate(group):
        simulation = forecast.simulations(first.rows[index])[0]
        assert simulation.peak_bytes is not None
        held = [answer.held[index] for answer in answers]
        pairs = zip(first.seconds[index], first.seconds[0], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        is_right = all(answer.right[index] for answer in answers)
        found.append(
            [
                contestant.schedule,
                contestant.name + ("" if is_right else ": wrong gradients"),
                _each(simulation.peak),
                _each(each["counted"] for each in held),
                _each(map(_mib, simulation.peak_bytes)),
                _each(_mib(each["bytes"]) for each in held),
                _each(_mib(each["within"]) for each in held),
                f"{forecast.seconds(first.rows[index]) / base:.2f}",
                f"{ratio:.2f}" if index else f"1 ({milliseconds:.0f} ms)",
            ]
        )
    found[0][-2] = f"1 ({1e3 * base:.0f} ms)"
    return found


def _each(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def _mib(size: Number) -> str:
    return f"{float(size) / MIB:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a small model, two schedules")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    asked = parser.parse_args()
    if asked.write and asked.short:
        sys.exit("--write takes a whole run: leave --short out")
    torch.set_num_threads(1)
    setting, work = Setting(), SHORT if asked.short else WORK
    found: list[list[str]] = []
    for group in GROUPS[: 1 if asked.short else None]:
        with Ranks(RANKS) as ranks:
            answers = ranks.run(measure, group, work, timeout=PATIENCE)
        found += lines(group, answers, work.sizes)
    text = table(HEAD, found)
    print(f"{text}\n\n{setting}")
    if asked.write:
        write(HERE / "README.md", "modes", text)
        write(HERE / "README.md", "setting", str(setting))


if __name__ == "__main__":
    main()
