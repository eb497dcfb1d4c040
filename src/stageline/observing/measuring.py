"""What the blocks of a model cost here: run as a pipeline runs them, with all ranks busy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from stageline.capturing.inputs import Arguments
from stageline.capturing.recorded import Graph
from stageline.errors import ConfigError
from stageline.observing.bench import Bench, Neighbours
from stageline.observing.progress import Progress
from stageline.partitioning.costs import ModelCosts
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
        repeats: How often everything is timed, two microbatches each; the median counts.
        busy: How many ranks run at the same time. If left out, as many as this process has cores,
            but at most 8 and at most one per block; one under torchrun, where every process
            measures at the same time.
        beside: How the ranks of the pipeline will live: as threads of one process, which wait for
            each other's interpreter lock, or as processes, which do not.
        loss_fn: ``(output, target) -> scalar``, which then counts to the last block.
        target: What the loss is given for the rows of the example.
        progress: Whether to show a bar; if left out, on a terminal when it takes a while.
    """
    faults = _faults(graph, rows, repeats, busy, beside)
    if faults:
        raise ConfigError("sl.measure_costs", faults)
    sizes = _sizes(graph.example, rows)
    count = _default_busy(len(graph.cuts) + 1) if busy is None else busy
    neighbours = Neighbours(count, _num_cores(), alone=beside == "processes")
    bench = Bench(graph, loss_fn, target)
    with Progress(len(sizes) * repeats, "measuring blocks", show=progress) as bar:
        found = [bench.measure(size, repeats, neighbours, bar.advance) for size in sizes]
    return replace(found[0], others=tuple(found[1:]))


def _faults(
    graph: object, rows: object, repeats: object, busy: object, beside: object
) -> list[str]:
    if not isinstance(graph, Graph):
        got = type(graph).__name__
        return [f"graph: wanted what sl.capture(model, args) returns, got {got}"]
    faults = [
        f"{name}={value!r}: wanted a whole number of at least 1"
        for name, value in (("repeats", repeats), ("busy", busy))
        if not _is_count(value) and (name, value) != ("busy", None)
    ]
    sizes = [rows] if rows is None or isinstance(rows, int) else rows
    if not isinstance(sizes, Sequence) or not _are_sizes(sizes):
        faults.append(f"rows={rows!r}: wanted a size of microbatches, or different ones")
    if graph.example.rows is None:
        faults.append("graph: its example has no tensor with rows: capture it with a batch")
    if beside not in get_args(Beside):
        faults.append(f"beside={beside!r}: wanted 'threads' or 'processes'")
    if is_abstract([graph.model]):
        faults.append("graph: the model is on meta, so nothing can be run: use sl.estimate_costs")
    return faults


def _are_sizes(sizes: Sequence[object]) -> bool:
    different = len(sizes) > 0 and len(set(sizes)) == len(sizes)
    return different and (all(map(_is_count, sizes)) or list(sizes) == [None])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _sizes(example: Arguments, rows: int | Sequence[int] | None) -> list[int]:
    if rows is None:
        assert example.rows is not None
        return [example.rows]
    return [rows] if isinstance(rows, int) else list(rows)


def _default_busy(num_blocks: int) -> int:
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        return 1  # every process measures at the same time, if each runs the same lines
    return min(_num_cores(), num_blocks, _MOST_BUSY)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
