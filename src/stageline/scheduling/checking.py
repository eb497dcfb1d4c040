"""Can this schedule run? Every fault of its rows, found at once.

1 numbering    stages 0..S-1 and microbatches 0..m-1 without a hole, no rank without work
2 placement    a stage is on one rank, or on one per copy of the model; a microbatch stays on it
3 completeness each stage runs each microbatch forward once; backward either for none of them,
               or for each: one B, or one I and one W
4 order        on its rank, F before B or I, I before W, R between F and B, REDUCE at the end
5 transfers    where the rows hold any: see checking_transfers.py
6 deadlock     no circle of ranks that wait for each other
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stageline.scheduling.action import Kind
from stageline.scheduling.checking_transfers import find_transfer_faults
from stageline.scheduling.ledger import Group, Integers, Ledger, actions_text, both, only, runs
from stageline.scheduling.schedule import Schedule
from stageline.scheduling.walk import walk
from stageline.scheduling.work import Work, is_sparse

GRADIENTS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""The kinds that make the gradient of a stage's input."""

_ORDERS = (
    (Kind.FORWARD, Kind.BACKWARD),
    (Kind.FORWARD, Kind.INPUT_GRADIENT),
    (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT),
    (Kind.FORWARD, Kind.RECOMPUTE),
    (Kind.RECOMPUTE, Kind.BACKWARD),
    (Kind.RECOMPUTE, Kind.INPUT_GRADIENT),
)


def find_faults(schedule: Schedule) -> list[str]:
    """Return what keeps a schedule from running, one sentence each; nothing if it can run.

    >>> from stageline.scheduling.text import parse
    >>> find_faults(parse("0F0 0B0 \\n 1F0"))
    ['rank 1: 1B0 is missing: run every microbatch backward on every stage, or none']
    """
    ledger = Ledger.of(schedule)
    stages = _used(ledger, "stage")
    microbatches = _used(ledger, "microbatch")
    faults = [
        *_empty_rows(schedule),
        *_holes("stage", stages),
        *_holes("microbatch", microbatches),
    ]
    for stage in stages.tolist():
        faults += _split_stage(ledger, stage, schedule.replicas)
        faults += _forward(ledger, stage, microbatches)
        if schedule.has_backward:
            faults += _backward(ledger, stage, microbatches)
        faults += _recompute(ledger, stage)
        faults += _order(ledger, stage)
        faults += _reduction(ledger, stage)
    faults += _strays(ledger) if schedule.replicas > 1 else []
    faults += find_transfer_faults(ledger, stages) if schedule.replicas == 1 else []
    if not is_sparse(schedule):
        # What is missing or late was reported above; here it only counts who waits for whom.
        deadlock = walk(Work.of(schedule, forgiving=True)).deadlock
        faults += [deadlock] if deadlock else []
    return faults


def _used(ledger: Ledger, name: str) -> Integers:
    return np.unique(ledger.rows[name][ledger.rows["kind"] <= Kind.RECOMPUTE]).astype(np.int64)


def _empty_rows(schedule: Schedule) -> Iterator[str]:
    for rank, row in enumerate(schedule.arrays):
        if not (row["kind"] <= Kind.RECOMPUTE).any():
            yield f"rank {rank}: the row computes nothing: give it a stage or leave the rank out"


def _holes(what: str, used: Integers) -> Iterator[str]:
    if not len(used):
        return
    ends = [-1, *(int(end) for run in runs(used) for end in (run[0], run[-1]))]
    for before, after in zip(ends[::2], ends[1::2], strict=False):
        if after - before > 1:
            hole = f"{before + 1}" if after - before == 2 else f"{before + 1} .. {after - 1}"
            yield f"{what} {hole} appears in no row: number them from 0 without a hole"


def _split_stage(ledger: Ledger, stage: int, replicas: int) -> Iterator[str]:
    ranks = ledger.holders[stage]
    if len(ranks) > replicas:
        names = " and ".join(str(rank) for rank in ranks)
        wanted = "one rank" if replicas == 1 else f"one rank for each of {replicas} copies"
        yield f"stage {stage} stands on ranks {names}: a stage runs on {wanted}"


def _strays(ledger: Ledger) -> Iterator[str]:
    """Find microbatches that change from one copy of a stage to another."""
    places = np.flatnonzero(ledger.rows["kind"] <= Kind.RECOMPUTE)
    rows, ranks = ledger.rows[places], ledger.ranks[places]
    order = np.lexsort((ranks, rows["microbatch"], rows["stage"]))
    stage, microbatch, ranks = rows["stage"][order], rows["microbatch"][order], ranks[order]
    same = (np.diff(stage) == 0) & (np.diff(microbatch) == 0)
    for at in np.flatnonzero(same & (np.diff(ranks) != 0)).tolist():
        yield (
            f"stage {stage[at]} runs microbatch {microbatch[at]} on ranks {ranks[at]} and "
            f"{ranks[at + 1]}: a microbatch stays with one copy"
        )


def _forward(ledger: Ledger, stage: int, microbatches: Integers) -> Iterator[str]:
    group = ledger.group(stage, Kind.FORWARD)
    missing = only(microbatches, group.microbatches)
    if len(missing):
        yield (
            f"{_rank(ledger, stage)}: {actions_text(stage, Kind.FORWARD, missing)} is missing: "
            f"run every microbatch forward on every stage"
        )
    yield from _repeats(ledger, group)


def _backward(ledger: Ledger, stage: int, microbatches: Integers) -> Iterator[str]:
    full, inputs, weights = (
        ledger.group(stage, kind)
        for kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    )
    where = _rank(ledger, stage)
    done = np.union1d(full.microbatches, inputs.microbatches)
    missing = only(microbatches, done)
    if len(missing):
        text = actions_text(stage, Kind.BACKWARD, missing)
        yield f"{where}: {text} is missing: run every microbatch backward on every stage, or none"
    halves = np.union1d(inputs.microbatches, weights.microbatches)
    doubled = both(full.microbatches, halves)
    if len(doubled):
        text = actions_text(stage, Kind.BACKWARD, doubled)
        yield f"{where}: {text} stands beside I or W: run B, or I and W, not both"
    for kind, have, other in (
        (Kind.INPUT_GRADIENT, weights, inputs),
        (Kind.WEIGHT_GRADIENT, inputs, weights),
    ):
        half = only(only(have.microbatches, other.microbatches), doubled)
        if len(half):
            text = actions_text(stage, kind, half)
            yield f"{where}: {text} is missing: a backward in two halves needs I and W"
    for group in (full, inputs, weights):
        yield from _repeats(ledger, group)


def _recompute(ledger: Ledger, stage: int) -> Iterator[str]:
    group = ledger.group(stage, Kind.RECOMPUTE)
    useless = only(group.microbatches, ledger.group(stage, *GRADIENTS).microbatches)
    if len(useless):
        text = actions_text(stage, Kind.RECOMPUTE, useless)
        yield f"{_rank(ledger, stage)}: {text} feeds no backward: leave it out"
    yield from _repeats(ledger, group)


def _order(ledger: Ledger, stage: int) -> Iterator[str]:
    for kind, after in _ORDERS:
        first, second = ledger.group(stage, kind), ledger.group(stage, after)
        for right, wrong in ledger.inverted(first, second):
            yield f"{ledger.where(wrong)} stands before {ledger.text(right)}: move it after that"


def _reduction(ledger: Ledger, stage: int) -> Iterator[str]:
    group = ledger.group(stage, Kind.REDUCE)
    if not len(group.places):
        return
    kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    reduction = int(group.places[0])
    last = max(int(ledger.group(stage, kind).places.max(initial=-1)) for kind in kinds)
    if last > reduction:
        yield (
            f"{ledger.where(reduction)} stands before {ledger.text(last)}: "
            f"move it after the last gradient of the stage"
        )
    yield from _repeats(ledger, group)


def _repeats(ledger: Ledger, group: Group) -> Iterator[str]:
    repeated = group.counts > 1
    for place, count in zip(
        group.places[repeated].tolist(), group.counts[repeated].tolist(), strict=True
    ):
        yield f"{ledger.where(place)} stands {count} times: run it once"


def _rank(ledger: Ledger, stage: int) -> str:
    return f"rank {ledger.holders[stage][0]}"
