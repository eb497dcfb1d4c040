"""``pippy.ModelSplit``: cut a model by size, without naming split points."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from stageline.capturing.graph import Cuttable
from stageline.partitioning.partition import partition
from stageline.partitioning.plan import Plan

__all__ = [
    "SplitPolicy",
    "split_by_graph",
    "split_into_equal_size",
    "split_on_size_threshold",
]


class SplitPolicy:
    """What ``split_policy=`` takes: cuts a captured model."""

    def __init__(self, cut: Callable[[Cuttable], Plan]) -> None:
        self._cut = cut

    def __call__(self, graph: Cuttable) -> Plan:
        return self._cut(graph)


def split_into_equal_size(nstages: int = 1) -> SplitPolicy:
    """Cut into stages with about as many parameters each."""
    return SplitPolicy(lambda graph: partition(graph, nstages, balance="parameters"))


def split_by_graph(nstages: int = 1) -> SplitPolicy:
    """Cut into stages that take about as long each, by estimates."""
    return SplitPolicy(lambda graph: partition(graph, nstages))


def split_on_size_threshold(threshold: int, max_stages: int = -1) -> SplitPolicy:
    """Begin a new stage where the next block would take a stage above a number of parameters.

    Args:
        threshold: How many numbers, in parameters and buffers, a stage may have.
        max_stages: How many stages there may be; -1 is any number.
    """

    def cut(graph: Cuttable) -> Plan:
        # As many blocks as can be had: some lie inside of modules that are opened for more stages.
        graph = graph.opened_at(graph.module_names)
        sizes, held = [0], 0
        for begin, end in pairwise([0, *graph.cuts, graph.num_nodes]):
            size = graph.load(begin, end).parameters
            if size and held and held + size > threshold and len(sizes) != max_stages:
                sizes.append(0)
                held = 0
            sizes[-1] += 1
            held += size
        return partition(graph, sizes)

    return SplitPolicy(cut)
