"""``stageline simulate``: how long a schedule takes and how much it holds, before anything runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageline.errors import ScheduleError
from stageline.scheduling import Costs, Schedule, Simulation, parse, schedules
from stageline.scheduling import simulate as run_simulation
from stageline.scheduling.costs import Number

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]  # argparse gives its type no public name


def add_to(commands: Commands) -> None:
    """Declare the command and its arguments."""
    names = ", ".join(schedules.NAMES)
    parser = commands.add_parser(
        "simulate",
        help="compute time, bubble and peak memory of a schedule",
        description="Compute time, bubble and peak memory of a schedule, exactly. "
        "Costs are numbers in any unit (1, 2.5, 1/3), or one per stage (1,2,1).",
    )
    add = parser.add_argument
    add("--schedule", required=True, help=f"{names}, or a text file with one line per rank")
    add("--ranks", type=int, metavar="P", help="workers (of a text file: its lines)")
    add("--microbatches", type=int, metavar="M", help="slices of the batch")
    add("--stages", type=int, metavar="S", help="pieces of the model (default: one per rank)")
    add("--forward", type=_cost, default=1, metavar="F", help="cost of a forward (default: 1)")
    add("--backward", type=_cost, default=2, metavar="B", help="cost of a backward (default: 2)")
    add("--latency", type=_number, default=0, metavar="C", help="of a transfer (default: 0)")
    add("--picture", action="store_true", help="draw what every rank does over time")
    add("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of the schedule that the arguments describe."""
    schedule = _schedule(arguments).check()
    costs = Costs(arguments.forward, arguments.backward, latency=arguments.latency)
    if arguments.json and arguments.picture:
        raise ScheduleError("--json and --picture exclude each other: choose one")
    if arguments.picture:
        print(schedule.picture(costs, color=sys.stdout.isatty()))
    elif arguments.json:
        print(json.dumps(_figures(run_simulation(schedule, costs))))
    else:
        print(run_simulation(schedule, costs))
    return 0


def _schedule(arguments: argparse.Namespace) -> Schedule:
    ranks, microbatches = arguments.ranks, arguments.microbatches
    path = Path(arguments.schedule)
    if path.suffix == ".txt" or path.is_file():
        schedule = parse(path.read_text(encoding="utf-8"), name=path.stem)
        for option, wanted, got in (
            ("--ranks", ranks, schedule.num_ranks),
            ("--microbatches", microbatches, schedule.num_microbatches),
            ("--stages", arguments.stages, schedule.num_stages),
        ):
            if wanted is not None and wanted != got:
                raise ScheduleError(f"{path} has {got} for {option}, not {wanted}: leave it out")
        return schedule
    stages = arguments.stages if arguments.stages is not None else ranks
    if ranks is None and stages is None:
        raise ScheduleError(f"schedule {arguments.schedule!r} needs --ranks or --stages: add one")
    if microbatches is None:
        raise ScheduleError(f"schedule {arguments.schedule!r} needs --microbatches: add it")
    return schedules.build(arguments.schedule, stages, microbatches, num_ranks=ranks)


def _figures(simulation: Simulation) -> dict[str, object]:
    schedule = simulation.schedule
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "T": _plain(simulation.T),
        "span": _plain(simulation.span),
        "bubble": _plain(simulation.bubble),
        "busy": [_plain(time) for time in simulation.busy],
        "peak": [_plain(peak) for peak in simulation.peak],
    }


def _plain(number: Number) -> int | float:
    """Return what JSON can hold: whole numbers as integers, all else as floats."""
    return int(number) if number == int(number) else float(number)


def _number(text: str) -> Number:
    """Read a number exactly: 2.5 is five halves, not the float next to it."""
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write 1, 2.5 or 1/3") from None
    return int(number) if number.denominator == 1 else number


def _cost(text: str) -> Number | Sequence[Number]:
    """Read one number, or several parted by commas."""
    numbers = [_number(part) for part in text.split(",")]
    return numbers[0] if len(numbers) == 1 else tuple(numbers)
