"""What the blocks of a model cost here: run as a pipeline runs them, with all ranks busy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from stageline.capturing.recorded import Graph
from stageline.errors import ConfigError
from stageline.observing.bench import Bench, Neighbours
from stageline.observing.progress import Progress
from stageline.partitioning.costs import ModelCosts
from stageline.partitioning.rows import is_count, read_rows
from stageline.running.loss import LossFunction
from stageline.running.materialising import is_abstract

Beside = Literal["threads", "processes"]
_MOST_BUSY = 8


def measure_costs(
    graph: Graph,
    *,
    rows: int | Sequence[int] | None = None,
    repeats: int = 6,
    busy: int | None = None,
    beside: Beside = "threads",
    loss_fn: LossFunction | None = None,
    target: Any = None,
    progress: bool | None = None,
) -> ModelCosts:
    """Run every block of a model forward and back, and return what each costs.

    The blocks are copies: the model, its gradients and the random numbers of the program stay as
    they were. Several ranks run at the same time, each its share of the blocks, because ranks that
    compute side by side slow each other down.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from stageline import capture
        >>> graph = capture(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.randn(2, 4),))
        >>> costs = measure_costs(graph, repeats=1)
        >>> [(block.name, block.parameters, block.output_bytes) for block in costs.blocks]
        [('0 Linear', 40, 64), ('1 ReLU', 0, 0)]

    Args:
        graph: What ``sl.capture`` returned.
        rows: The size of a microbatch, or several sizes; as many as the example has if left out.
            Rows of the example are left out or repeated.
        repeats: How often everything is timed, two microbatches each; the lower quartile counts,
            for other programs only ever add to a time.
        busy: How many ranks run at the same time. If left out, as many as this process has cores,
            but at most 8 and at most one per block; one under torchrun, where every process
            measures at the same time.
        beside: How the ranks of the pipeline will live: as threads of one process, which wait for
            each other's interpreter lock, or as processes, which do not.
        loss_fn: ``(output, target) -> scalar``, which then counts to the last block.
        target: What the loss is given for the rows of the example.
        progress: Whether to show a bar; if left out, on a terminal when it takes a while.
    """
    faults = _faults(graph, repeats, busy, beside)
    sizes, more = read_rows(rows, graph.example) if isinstance(graph, Graph) else ([], [])
    if faults or more:
        raise ConfigError("sl.measure_costs", [*faults, *more])
    count = _default_busy(len(graph.cuts) + 1) if busy is None else busy
    neighbours = Neighbours(count, _num_cores(), alone=beside == "processes")
    bench = Bench(graph, loss_fn, target)
    with Progress(len(sizes) * repeats, "measuring blocks", show=progress) as bar:
        found = [bench.measure(size, repeats, neighbours, bar.advance) for size in sizes]
    return replace(found[0], others=tuple(found[1:]))


def _faults(graph: object, repeats: object, busy: object, beside: object) -> list[str]:
    faults = []
    if not isinstance(graph, Graph):
        got = type(graph).__name__
        faults.append(f"graph: wanted what sl.capture(model, args) returns, got {got}")
    elif is_abstract([graph.model]):
        faults.append("graph: the model is on meta, so nothing can be run: use sl.estimate_costs")
    faults += [
        f"{name}={value!r}: wanted a whole number of at least 1"
        for name, value in (("repeats", repeats), ("busy", busy))
        if not is_count(value) and (name, value) != ("busy", None)
    ]
    if beside not in get_args(Beside):
        faults.append(f"beside={beside!r}: wanted 'threads' or 'processes'")
    return faults


def _default_busy(num_blocks: int) -> int:
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        return 1  # every process measures at the same time, if each runs the same lines
    return min(_num_cores(), num_blocks, _MOST_BUSY)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
