"""From a graph and what the user said about cuts to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from stageline.capturing.graph import Cuttable
from stageline.errors import ConfigError, ScheduleError
from stageline.partitioning import splits
from stageline.partitioning.amounts import read_bytes, show_bytes
from stageline.partitioning.blocks import Blocks
from stageline.partitioning.budget import Budget
from stageline.partitioning.costs import ModelCosts
from stageline.partitioning.device import Device
from stageline.partitioning.plan import Plan
from stageline.partitioning.rows import is_count
from stageline.partitioning.weighing import BALANCES, Balance
from stageline.scheduling import Schedule, schedules


def partition(
    graph: Cuttable,
    split: splits.Split,
    *,
    balance: Balance = "time",
    memory_limit: int | str | None = None,
    ranks: int | None = None,
    costs: ModelCosts | None = None,
    schedule: str | Schedule | None = None,
    num_microbatches: int | None = None,
    device: Device | None = None,
) -> Plan:
    """Cut a captured model into stages.

    Example:
        >>> from torch import nn
        >>> from stageline.capturing import capture_sequential
        >>> graph = capture_sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> [stage.calls for stage in partition(graph, split=["2"]).stages]
        [('0 Linear', '1 ReLU'), ('2 Linear',)]

    Args:
        graph: What ``sl.capture`` returned.
        split: Where to cut: a number of stages, numbers of blocks, names of modules or blocks, or
            ``"marks"``.
        balance: What a number of stages makes even: estimated ``"time"``, ``"memory"`` or
            ``"parameters"``.
        memory_limit: What a rank has, in bytes or as text, ``"16GiB"``: for weights, gradients and
            two moments of the optimizer, and the activations that the schedule keeps. If left out,
            what the device has.
        ranks: How many ranks share the stages, each some that follow each other or as the schedule
            says; one per stage if left out.
        costs: What the blocks cost, from ``sl.measure_costs`` or ``sl.estimate_costs``; the graph's
            own estimates if left out.
        schedule: A schedule or the name of one: where it places stages, and how many microbatches
            each holds at a time; as in 1F1B if left out.
        num_microbatches: For a schedule that is named; 4 per rank if left out.
        device: What ranks run on, and what connects them; a nominal link if left out.
    """
    budget = Budget(None, ranks, schedule, num_microbatches, device)
    return decided(graph, split, splits.decide_alone, balance, memory_limit, budget, costs)


def decided(
    graph: Cuttable,
    split: splits.Split,
    decide: splits.Decide,
    balance: Balance,
    memory_limit: int | str | None,
    budget: Budget,
    costs: ModelCosts | None = None,
) -> Plan:
    """Cut a captured model where somebody decides; the rest as in ``partition``."""
    faults = [*_graph_faults(graph), *splits.find_faults(split)]
    faults += option_faults(balance, memory_limit, budget.num_ranks)
    faults += _cost_faults(costs, budget)
    if faults:
        raise ConfigError("sl.partition", faults)
    limit = read_bytes(memory_limit)
    if limit is None and budget.device is not None:
        limit = budget.device.memory
    budget = replace(budget, limit=limit)
    paths = splits.paths_wanted(split)
    opened_for = split if isinstance(split, int) else 1
    graph = graph.opened_at(paths, num_stages=opened_for)
    if graph.findings:
        raise ConfigError("sl.partition", graph.findings)
    if costs is not None and len(costs.blocks) != len(graph.cuts) + 1:
        raise ConfigError("sl.partition", [_other_blocks(costs, graph, opened_for)])
    resolve = partial(splits.resolve, graph, split, balance=balance, budget=budget, costs=costs)
    cuts, faults = decide(graph, resolve)
    faults = faults or _stage_faults(graph, cuts, budget, costs)
    if faults:
        raise ConfigError("sl.partition", faults)
    placement = budget.placement(len(cuts) + 1)
    measured = None if costs is None else costs.stages(_sizes(graph, cuts))
    return Plan.of(graph, cuts, placement, opened=paths, opened_for=opened_for, costs=measured)


def _graph_faults(graph: Any) -> list[str]:
    if isinstance(graph, Cuttable):
        return []
    got = type(graph).__name__
    return [f"graph: wanted what sl.capture(model, args) returns, got {got}"]


def option_faults(balance: object, memory_limit: object, ranks: object) -> list[str]:
    """Return what is wrong with options, whatever the model."""
    faults = []
    if balance not in BALANCES:
        wanted = ", ".join(repr(name) for name in BALANCES)
        faults.append(f"balance={balance!r}: wanted one of {wanted}")
    if memory_limit is not None and read_bytes(memory_limit) is None:
        faults.append(f"memory_limit={memory_limit!r}: wanted bytes, or text like '16GiB'")
    return faults + _count_faults("ranks", ranks)


def _count_faults(name: str, value: object) -> list[str]:
    if value is None or is_count(value):
        return []
    return [f"{name}={value!r}: wanted a whole number of at least 1"]


def _cost_faults(costs: object, budget: Budget) -> list[str]:
    """Return what is wrong with the terms, whatever the model."""
    faults = _count_faults("num_microbatches", budget.num_microbatches)
    if costs is not None and not isinstance(costs, ModelCosts):
        got = type(costs).__name__
        faults.append(f"costs: wanted what sl.measure_costs(graph) returns, got {got}")
    if budget.device is not None and not isinstance(budget.device, Device):
        got = type(budget.device).__name__
        faults.append(f"device: wanted an sl.Device, got {got}: sl.Device.named('A100')")
    given = budget.schedule
    try:
        refusal = schedules.family(given).refusal if isinstance(given, str) else None
    except ScheduleError as error:
        return [*faults, f"schedule: {error}"]
    if given is not None and not isinstance(given, (str, Schedule)):
        refusal = f"wanted a Schedule or the name of one, got {type(given).__name__}"
    elif isinstance(given, Schedule):
        refusal = given.refusal
    return faults if refusal is None else [*faults, f"schedule: {refusal}"]


def _other_blocks(costs: ModelCosts, graph: Cuttable, num_stages: int) -> str:
    count = len(graph.cuts) + 1
    opened = f", opened for {num_stages} stages," if num_stages > 1 else ""
    return (
        f"costs: they are for {len(costs.blocks)} blocks, the model{opened} has {count}: measure "
        f"graph.opened_at([], num_stages={num_stages})"
    )


def _sizes(graph: Cuttable, cuts: Sequence[int]) -> list[int]:
    """Return how many blocks each stage has."""
    places = [0, *graph.cuts, graph.num_nodes]
    ends = [places.index(place) for place in (0, *cuts, graph.num_nodes)]
    return [b - a for a, b in pairwise(ends)]


def _stage_faults(
    graph: Cuttable, cuts: Sequence[int], budget: Budget, costs: ModelCosts | None
) -> list[str]:
    """Return what is wrong with cuts for these ranks, and every rank that needs too much."""
    faults = budget.faults(len(cuts) + 1)
    if faults:
        return faults
    if costs is not None and not {*cuts} <= {*graph.cuts}:
        return ["costs: the split cuts inside a block: cut between blocks, or leave costs out"]
    return _memory_faults(graph, cuts, budget, costs)


def _memory_faults(
    graph: Cuttable, cuts: Sequence[int], budget: Budget, costs: ModelCosts | None
) -> list[str]:
    """Return a fault for every rank that needs more than it has."""
    limit = budget.limit
    if limit is None:
        return []
    if costs is None:
        blocks, sizes = Blocks.of_graph(graph, cuts), [1] * (len(cuts) + 1)
    else:
        blocks = Blocks.of_costs(costs, budget.kinds(len(cuts) + 1))
        sizes = _sizes(graph, cuts)
    needed = budget.rank_memory(blocks, sizes)
    return [
        f"memory_limit={show_bytes(limit)}: rank {rank} needs {show_bytes(count)}, "
        f"{show_bytes(count - limit)} too much: give it less, or let split=n choose the cuts"
        for rank, count in enumerate(needed)
        if count > limit
    ]
