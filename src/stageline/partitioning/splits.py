"""What the user said about cuts: read, and checked with every finding at once.

split=4        four stages, balanced by parameters
split=[2, 1]   the first two blocks, then one
"""

from __future__ import annotations

from collections.abc import Sequence

from stageline.capturing import Graph
from stageline.partitioning.balance import balance

Split = int | Sequence[int]


def find_faults(split: object) -> list[str]:
    """Return what is wrong with a split, whatever the model."""
    if isinstance(split, bool) or not isinstance(split, (int, list, tuple)):
        return [f"split={split!r}: wanted a number of stages (4) or blocks per stage ([2, 1])"]
    if isinstance(split, int):
        return [] if split >= 1 else [f"split={split}: wanted a number of stages, at least 1"]
    if not split:
        return ["split=[]: wanted the number of blocks of each stage, [2, 1]"]
    return [
        f"split={list(split)!r}: stage {stage} has {size!r} blocks, wanted a whole number of at "
        "least 1"
        for stage, size in enumerate(split)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]


def num_stages_of(split: Split) -> int:
    """Return how many stages a split asks for."""
    return split if isinstance(split, int) else len(split)


def cut_sizes(graph: Graph, split: Split) -> tuple[list[int], list[str]]:
    """Return the number of blocks per stage, and what is wrong with the split for this model."""
    available = len(graph.blocks)
    if isinstance(split, int):
        if split > available:
            return [], [
                f"split={split}: the model has {available} blocks, so it can be cut into at most "
                f"{available} stages"
            ]
        return balance([block.num_parameters for block in graph.blocks], split), []
    if sum(split) != available:
        names = ", ".join(str(block) for block in graph.blocks)
        return [], [
            f"split={list(split)} places {sum(split)} blocks, the model has {available}: {names}"
        ]
    return list(split), []
