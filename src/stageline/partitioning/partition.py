"""From a graph and what the user said about cuts to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from stageline.capturing.graph import Cuttable
from stageline.errors import ConfigError
from stageline.partitioning import splits
from stageline.partitioning.amounts import read_bytes, show_bytes
from stageline.partitioning.plan import Plan
from stageline.partitioning.weighing import BALANCES, Balance, stage_memory
from stageline.scheduling.schedules.rows import contiguous


def partition(
    graph: Cuttable,
    split: splits.Split,
    *,
    balance: Balance = "time",
    memory_limit: int | str | None = None,
    ranks: int | None = None,
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
            two moments of the optimizer, and the activations that 1F1B keeps.
        ranks: How many ranks share the stages, each some that follow each other; one per stage if
            left out.
    """
    return decided(graph, split, splits.decide_alone, balance, memory_limit, ranks)


def decided(
    graph: Cuttable,
    split: splits.Split,
    decide: splits.Decide,
    balance: Balance,
    memory_limit: int | str | None,
    ranks: int | None,
) -> Plan:
    """Cut a captured model where somebody decides; the rest as in ``partition``."""
    limit = read_bytes(memory_limit)
    faults = [*_graph_faults(graph), *splits.find_faults(split)]
    faults += option_faults(balance, memory_limit, ranks)
    if faults:
        raise ConfigError("sl.partition", faults)
    paths = splits.paths_wanted(split)
    opened_for = split if isinstance(split, int) else 1
    graph = graph.opened_at(paths, num_stages=opened_for)
    if graph.findings:
        raise ConfigError("sl.partition", graph.findings)
    resolve = partial(splits.resolve, graph, split, balance=balance)
    cuts, faults = decide(graph, partial(resolve, memory_limit=limit, num_ranks=ranks))
    num_stages = len(cuts) + 1
    if not faults and ranks is not None and ranks > num_stages:
        faults = [f"ranks={ranks}: there are only {num_stages} stages: use as many ranks"]
    if faults:
        raise ConfigError("sl.partition", faults)
    placement = [
        rank
        for rank, stages in enumerate(contiguous(num_stages, ranks or num_stages))
        for _ in stages
    ]
    faults = _memory_faults(graph, cuts, placement, limit)
    if faults:
        raise ConfigError("sl.partition", faults)
    return Plan.of(graph, cuts, placement, opened=paths, opened_for=opened_for)


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
    is_number = isinstance(ranks, int) and not isinstance(ranks, bool)
    if ranks is not None and (not is_number or ranks < 1):  # type: ignore[operator]  # a number
        faults.append(f"ranks={ranks!r}: wanted a whole number of at least 1")
    return faults


def _memory_faults(
    graph: Cuttable, cuts: Sequence[int], placement: Sequence[int], limit: int | None
) -> list[str]:
    """Return a fault for every rank that needs more than it has."""
    if limit is None:
        return []
    needed: dict[int, int] = {}
    ends = (0, *cuts, graph.num_nodes)
    for stage, (begin, end) in enumerate(pairwise(ends)):
        rank = placement[stage]
        memory = stage_memory(graph.load(begin, end), stage, len(placement))
        needed[rank] = needed.get(rank, 0) + memory
    return [
        f"memory_limit={show_bytes(limit)}: rank {rank} needs {show_bytes(count)}, "
        f"{show_bytes(count - limit)} too much: give it less, or let split=n choose the cuts"
        for rank, count in needed.items()
        if count > limit
    ]
