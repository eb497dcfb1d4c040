"""How good are schedules that were searched for, and how long does it take? See README.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stageline.planning import Found, find_schedule
from stageline.planning.searching.problem import Metric
from stageline.scheduling import Costs
from stageline.scheduling.costs import Number, number_text
from tests.planning.published import STRAIGHT, UNEQUAL, VEE


class Case(NamedTuple):
    """One row of the table."""

    what: str
    ranks: int
    microbatches: int
    stages: int
    costs: Costs
    metric: Metric
    activations: int | None = None
    bytes_: int | None = None
    published: Number | None = None


def cases() -> Iterator[Case]:
    """Yield the rows, section by section."""
    for each, (one, two) in STRAIGHT.items():
        size = (f"ZB {each.p} x {each.m}", each.p, each.m, each.p, each.costs)
        yield Case(*size, "span", bytes_=each.p * each.kept, published=one)
        yield Case(*size, "span", bytes_=2 * each.p * each.kept, published=two)
        yield Case(*size, "span", activations=each.p, published=one)
        yield Case(*size, "span", activations=2 * each.p)
        yield Case(*size, "T", activations=each.p, published=one)
    for each, reached in VEE.items():
        size = (f"ZB-V {each.p} x {each.m}", each.p, each.m, 2 * each.p, each.costs)
        yield Case(*size, "span", activations=each.p, published=reached)
        yield Case(*size, "T", activations=each.p)
    unit = Costs(forward=1, input_gradient=1, weight_gradient=1)
    for p in (4, 8, 16):
        for k in range(p, 2 * p):
            want = 3 * 2 * p + 2 * p - 1 - k
            yield Case(f"unit {p} x {2 * p}", p, 2 * p, p, unit, "span", k, published=want)
    half = Costs(
        forward=5, input_gradient=6, weight_gradient=4, activation_bytes=2, input_gradient_frees=1
    )
    for limit, reached in ((10, 193), (14, 183)):
        yield Case("5 6 4, 4 x 12", 4, 12, 4, half, "span", bytes_=limit, published=reached)
    for p, m, f, b, w, c, k, reached in UNEQUAL:
        costs = Costs(forward=f, input_gradient=b, weight_gradient=w, latency=c)
        yield Case(f"unequal {p} x {m}", p, m, p, costs, "span", k, published=reached)


def measure(case: Case) -> tuple[Found, float]:
    """Return what was found, and the seconds it took."""
    begin = time.perf_counter()
    found = find_schedule(
        case.ranks,
        case.microbatches,
        case.costs,
        num_stages=case.stages,
        metric=case.metric,
        memory_limit=case.activations,
        memory_limit_bytes=case.bytes_,
    )
    return found, time.perf_counter() - begin


def line(case: Case) -> str:
    """Measure a row and write it down."""
    found, seconds = measure(case)
    built_in = min(
        (each.T if case.metric == "T" else each.span, each.name)
        for each in found.candidates
        if each.fits and each.name not in ("search", "solver")
    )
    kept = case.costs.activation_bytes
    limit = f"{case.activations}"
    if case.bytes_ is not None and isinstance(kept, int):
        limit = f"{number_text(case.bytes_ // kept)} in bytes"
    published = "" if case.published is None else number_text(case.published)
    cells = [case.what, case.metric, limit, f"{number_text(built_in[0])} {built_in[1]}", published]
    cells += [number_text(found.reached), number_text(found.bound), f"{float(found.gap):.2%}"]
    return f"| {' | '.join([*cells, f'{seconds:.1f}'])} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few small rows only")
    short = parser.parse_args().short
    print(
        "| ranks x microbatches | metric | limit | built in | published | found | bound | gap | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases():
        if not short or case.ranks * case.microbatches < 100:
            print(line(case), flush=True)


if __name__ == "__main__":
    main()
