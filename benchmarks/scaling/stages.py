"""How a step grows with the number of stages, each an emulated device that sleeps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.overhead.devices import TRANSPORTS, Step, measure
from benchmarks.tools.pages import table
from benchmarks.tools.ranks import Ranks

COUNTS = (2, 4, 8, 16)
MICROBATCHES = 32


def run(
    counts: Sequence[int], milliseconds: float, steps: int
) -> dict[int, dict[str, Sequence[Step]]]:
    """Return the steps of 1F1B by number of stages and transport."""
    found: dict[int, dict[str, Sequence[Step]]] = {}
    for count in counts:
        with Ranks(count) as ranks:
            found[count] = {
                transport: ranks.run(
                    measure, "1f1b", transport, milliseconds / 1000, steps, count, MICROBATCHES
                )[0]
                for transport in TRANSPORTS
            }
    return found


def text(found: dict[int, dict[str, Sequence[Step]]]) -> str:
    """Return the table: milliseconds of a step, over the makespan of its own sleeps."""
    head = ["stages", *(f"{name}, ms (over makespan)" for name in TRANSPORTS.values())]
    rows = []
    for count, by_transport in found.items():
        cells = [
            f"{1e3 * statistics.median(step.seconds for step in steps):.0f} "
            f"({statistics.median(step.ratio for step in steps):.3f})"
            for steps in by_transport.values()
        ]
        rows.append([str(count), *cells])
    return table(head, rows)
