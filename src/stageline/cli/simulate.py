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
from stageline.planning import Found, find_schedule
from stageline.planning.searching.finding import METRICS
from stageline.planning.searching.placements import PLACEMENTS
from stageline.scheduling import Costs, Schedule, Simulation, parse, schedules
from stageline.scheduling import simulate as run_simulation
from stageline.scheduling.costs import Number, number_text
from stageline.wording import aligned

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]  # argparse gives its type no public name

AUTO = "auto"
"""The name that stands for a search."""

DOES_NOT_FIT = 1
"""The exit status when a rank holds more than the memory limit."""

MOST_DRAWN = 20_000
"""Of how many actions a time line is drawn in the terminal."""

EPILOG = """\
Costs are in any unit, per stage as placed: with two stages on a rank, of each of them. One number
(1, 2.5, 1/3) is for all stages, several (1,2,1) for one each; latency, bandwidth and edge bytes are
per cut then. With --schedule auto the best schedule is searched for: on one stage per rank, or on
two (--stages-per-rank 2) straight, looped and in a V. Activations are those of one microbatch in a
rank's share of the model.
Exit status: 0, or 1 if the schedule does not fit into --memory-limit, or 2 for wrong input."""


def add_to(commands: Commands) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "simulate",
        help="compute time, bubble and peak memory of a schedule",
        description="Compute time, bubble and peak memory of a schedule, exactly, and draw it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_schedule(parser)
    _add_costs(parser)
    _add_search(parser)
    add = parser.add_argument_group("output").add_argument
    add("--memory-limit", type=_number, metavar="N", help="activations that a rank may hold")
    add("--json", action="store_true", help="print the figures as one JSON object")
    add("--svg", type=Path, metavar="FILE", help="write the time line as a picture")
    parser.set_defaults(run=run)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    names = ", ".join((*schedules.NAMES, AUTO))
    add = parser.add_argument_group("schedule").add_argument
    add("--schedule", required=True, help=f"{names}, or a text file with one line per rank")
    add("--ranks", type=int, metavar="P", help="workers (of a text file: its lines)")
    add("--microbatches", type=int, metavar="M", help="slices of the batch")
    add("--stages", type=int, metavar="S", help="pieces of the model (default: the schedule's own)")
    add("--stages-per-rank", type=int, metavar="V", help="the same, per rank")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("costs").add_argument
    add("--forward", type=_cost, default=1, metavar="F", help="of a forward (default: 1)")
    add("--backward", type=_cost, metavar="B", help="of a full backward (default: I + W, or 2)")
    add("--input-grad", type=_cost, metavar="I", help="of its first half (default: B / 2)")
    add("--weight-grad", type=_cost, metavar="W", help="of its second half (default: B / 2)")
    add("--pair", type=_number, metavar="FB", help="of F and B that overlap (default: F + B)")
    add("--recompute", type=_cost, metavar="R", help="of a forward again (default: F)")
    add("--latency", type=_cost, default=0, metavar="C", help="of a hop between ranks (default: 0)")
    add("--bandwidth", type=_cost, metavar="BW", help="bytes per unit of time (default: no limit)")
    add("--edge-bytes", type=_cost, default=0, metavar="N", help="size of what crosses a cut")
    add("--activation-bytes", type=_cost, metavar="N", help="kept by a stage, per microbatch")
    add("--input-bytes", type=_cost, default=0, metavar="N", help="of them: kept even before R")
    add("--freed-bytes", type=_cost, default=0, metavar="N", help="of them: released by I, not W")


def _add_search(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(f"search (--schedule {AUTO})").add_argument
    add("--metric", choices=METRICS, default="T", help="what is to be small (default: T)")
    add("--placement", choices=PLACEMENTS, help="of the stages (default: the best)")
    add("--memory-limit-bytes", type=_number, metavar="N", help="instead of --memory-limit")
    add("--effort", type=float, default=1.0, metavar="X", help="how long to search (default: 1)")
    add("--solver", type=float, metavar="SECONDS", help="let OR-tools improve or prove the result")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of the schedule that the arguments describe."""
    found = _found(arguments) if arguments.schedule == AUTO else None
    if found is None:
        simulation = run_simulation(_schedule(arguments), _costs(arguments))
    else:
        simulation = found.simulation
    limit: Number | None = arguments.memory_limit
    holding = max(simulation.peak_activations)
    fits = limit is None or holding <= limit
    if arguments.svg:
        arguments.svg.write_text(simulation.svg(), encoding="utf-8")
    if arguments.json:
        memory = {} if limit is None else {"memory_limit": _plain(limit), "fits": fits}
        print(json.dumps(_figures(simulation) | memory | _search_figures(found)))
    else:
        print(_table(simulation))
        if found is not None:
            print(f"{found.schedule.name} {found.verdict()}")
        if limit is not None:
            print(_fit(simulation, holding, limit))
    return 0 if fits else DOES_NOT_FIT


def _costs(arguments: argparse.Namespace) -> Costs:
    return Costs(
        forward=arguments.forward,
        backward=arguments.backward,
        input_gradient=arguments.input_grad,
        weight_gradient=arguments.weight_grad,
        recompute=arguments.recompute,
        pair=arguments.pair,
        latency=arguments.latency,
        bandwidth=arguments.bandwidth,
        edge_bytes=arguments.edge_bytes,
        activation_bytes=arguments.activation_bytes,
        input_bytes=arguments.input_bytes,
        input_gradient_frees=arguments.freed_bytes,
    )


def _schedule(arguments: argparse.Namespace) -> Schedule:
    path = Path(arguments.schedule)
    if path.suffix == ".txt" or path.is_file():
        return _from_file(path, arguments)
    stages, microbatches = _num_stages(arguments), arguments.microbatches
    if stages is None:
        raise ScheduleError(f"schedule {arguments.schedule!r} needs --ranks or --stages: add one")
    if microbatches is None:
        raise ScheduleError(f"schedule {arguments.schedule!r} needs --microbatches: add it")
    return schedules.build(arguments.schedule, stages, microbatches, num_ranks=arguments.ranks)


def _found(arguments: argparse.Namespace) -> Found:
    """Search for a schedule; one stage per rank unless the arguments or the costs say otherwise."""
    for option, value in (("--ranks", arguments.ranks), ("--microbatches", arguments.microbatches)):
        if value is None:
            raise ScheduleError(f"schedule {AUTO!r} needs {option}: add it")
    return find_schedule(
        arguments.ranks,
        arguments.microbatches,
        _costs(arguments),
        num_stages=_num_stages(arguments) if _says_stages(arguments) else None,
        placement=arguments.placement,
        metric=arguments.metric,
        memory_limit=arguments.memory_limit,
        memory_limit_bytes=arguments.memory_limit_bytes,
        effort=arguments.effort,
        solver=arguments.solver,
    )


def _says_stages(arguments: argparse.Namespace) -> bool:
    return arguments.stages is not None or arguments.stages_per_rank is not None


def _search_figures(found: Found | None) -> dict[str, object]:
    if found is None:
        return {}
    return {
        "source": found.source,
        "metric": found.metric,
        "lower_bound": _plain(found.bound),
        "gap": _plain(found.gap),
        "candidates": [
            {
                "schedule": candidate.name,
                "makespan": _plain(candidate.T),
                "span": _plain(candidate.span),
                "peak_activations": _plain(candidate.peak),
                "fits": candidate.fits,
            }
            for candidate in found.candidates
        ],
    }


def _num_stages(arguments: argparse.Namespace) -> int | None:
    ranks, stages, per_rank = arguments.ranks, arguments.stages, arguments.stages_per_rank
    if per_rank is None:
        if stages is not None or ranks is None:
            given: int | None = stages
            return given
        return schedules.family(arguments.schedule).num_stages(ranks)
    if per_rank < 1:
        raise ScheduleError(f"--stages-per-rank is {per_rank}: a rank holds at least one stage")
    if ranks is None:
        raise ScheduleError("--stages-per-rank needs --ranks: add it")
    if stages is not None and stages != ranks * per_rank:
        raise ScheduleError(
            f"--stages {stages} is not --ranks {ranks} times --stages-per-rank {per_rank}: "
            f"leave one of them out"
        )
    return int(ranks * per_rank)


def _from_file(path: Path, arguments: argparse.Namespace) -> Schedule:
    schedule = parse(path.read_text(encoding="utf-8"), name=path.stem)
    for option, wanted, got in (
        ("--ranks", arguments.ranks, schedule.num_ranks),
        ("--microbatches", arguments.microbatches, schedule.num_microbatches),
        ("--stages", arguments.stages, schedule.num_stages),
        (
            "--stages-per-rank",
            arguments.stages_per_rank,
            _plain(Fraction(schedule.num_stages, schedule.num_ranks)),
        ),
    ):
        if wanted is not None and wanted != got:
            raise ScheduleError(f"{path} has {got} for {option}, not {wanted}: leave it out")
    return schedule.check()


def _figures(simulation: Simulation) -> dict[str, object]:
    schedule = simulation.schedule
    figures: dict[str, object] = {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "makespan": _plain(simulation.T),
        "span": _plain(simulation.span),
        "bubble": _plain(simulation.bubble),
        "span_bubble": _plain(simulation.span_bubble),
        "peak_activations": [_plain(peak) for peak in simulation.peak_activations],
        "busy": [_plain(time) for time in simulation.busy],
        "idle": [_plain(time) for time in simulation.idle],
        "wait": [_plain(time) for time in simulation.wait],
    }
    if simulation.peak_bytes is not None:
        figures["peak_bytes"] = [_plain(size) for size in simulation.peak_bytes]
    return figures


def _table(simulation: Simulation) -> str:
    """Return the time line, a table of the ranks, and the figures of the whole."""
    columns = {
        "rank": [str(rank) for rank in range(simulation.schedule.num_ranks)],
        "busy": [number_text(time) for time in simulation.busy],
        "idle": [number_text(time) for time in simulation.idle],
        "wait": [number_text(time) for time in simulation.wait],
        "peak activations": [number_text(peak) for peak in simulation.peak_activations],
    }
    if simulation.peak_bytes is not None:
        columns["peak bytes"] = [number_text(size) for size in simulation.peak_bytes]
    drawn = str(simulation)
    if len(simulation.schedule) <= MOST_DRAWN:
        drawn = simulation.picture(color=sys.stdout.isatty())
    return (
        f"{drawn}\n\n{aligned(columns)}\n\n"
        f"makespan {number_text(simulation.T)}, bubble {float(simulation.bubble):.2%}\n"
        f"span {number_text(simulation.span)}, bubble {float(simulation.span_bubble):.2%}"
    )


def _fit(simulation: Simulation, holding: Number, limit: Number) -> str:
    name = simulation.schedule.name
    if holding <= limit:
        return f"{name} fits: at most {number_text(holding)} of {number_text(limit)} activations"
    rank = simulation.peak_activations.index(holding)
    return (
        f"{name} does not fit: rank {rank} holds {number_text(holding)} activations, "
        f"the limit is {number_text(limit)}"
    )


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
