"""What the user said about cuts: read, and checked with every finding at once.

split=4                              four stages, balanced
split=[2, 1]                         the first two blocks, then one
split=["layers.4", "layers.8"]       a stage begins at each named module
split={"iter_block": "end"}          a stage ends after each call of that module
split=[["B1", "B2"], ["B3", "B4"]]   named blocks, stage by stage
split="marks"                        every mark is a cut

This file knows the spellings and the two that count blocks; named.py knows the four that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from reprlib import Repr
from typing import Any

from stageline.capturing.graph import Cuttable
from stageline.partitioning import named
from stageline.partitioning.budget import Budget
from stageline.partitioning.costs import ModelCosts
from stageline.partitioning.weighing import Balance, lightest_cuts

Split = int | str | Sequence[int] | Sequence[str] | Sequence[Sequence[str]] | Mapping[str, str]

Cuts = tuple[list[int], list[str]]
"""Positions at which a graph is cut, and what is wrong with them."""

Decide = Callable[[Cuttable, Callable[[], Cuts]], Cuts]
"""Decides where a graph is cut; the function that it is given finds out."""

SIDES = ("begin", "end")

_WANTED = (
    "wanted a number of stages (4) or blocks per stage ([2, 1]), modules at which stages begin "
    '(["layers.4"]), {"module": "end"}, blocks by name ([["B1"], ["B2"]]), or "marks"'
)

_short = Repr()
_short.maxlist = _short.maxtuple = _short.maxdict = 12
_short.maxstring = _short.maxother = 60


def decide_alone(graph: Cuttable, make: Callable[[], Cuts]) -> Cuts:
    """Cut a graph where it is best, asking nobody."""
    return make()


def find_faults(split: object) -> list[str]:
    """Return what is wrong with a split, whatever the model.

    Example:
        >>> find_faults(["layers.4", "layers.4"])
        ["split: 'layers.4' is named twice"]
    """
    if isinstance(split, int) and not isinstance(split, bool):
        return [] if split >= 1 else [f"split={split}: wanted a number of stages, at least 1"]
    if isinstance(split, Mapping):
        return _mapping_faults(split)
    if isinstance(split, (list, tuple)):
        return _list_faults(split)
    return [] if split == "marks" else [f"split={_short.repr(split)}: {_WANTED}"]


def paths_wanted(split: object) -> list[str]:
    """Return the modules that a split names, or may name: a capture must open what holds them.

    Example:
        >>> paths_wanted([["embed", "layers.0"], ["layers.1"]])
        ['embed', 'layers.0', 'layers.1']
    """
    if isinstance(split, Mapping):
        names: list[Any] = list(split)
    elif isinstance(split, (list, tuple)):
        names = [
            name
            for entry in split
            for name in (entry if isinstance(entry, (list, tuple)) else [entry])
        ]
    else:
        return []
    return [name for name in names if isinstance(name, str)]


def resolve(
    graph: Cuttable,
    split: object,
    *,
    balance: Balance = "time",
    budget: Budget | None = None,
    costs: ModelCosts | None = None,
) -> Cuts:
    """Return the positions at which a graph is cut, and what is wrong with the split for it.

    Args:
        graph: The model; opened at the modules that the split names.
        split: One of the six spellings.
        balance: What ``split=4`` makes even.
        budget: What ranks have and run; stages chosen here keep to it.
        costs: What the blocks cost; the graph's own estimates if left out.
    """
    faults = find_faults(split)
    if faults:
        return [], faults
    if isinstance(split, Mapping):
        return named.cuts_beside_calls(graph, split)
    if split == "marks":
        return named.cuts_at_marks(graph)
    assert isinstance(split, (int, list, tuple))
    if isinstance(split, int) or isinstance(split[0], int):
        sizes, faults = cut_sizes(graph, split, balance=balance, budget=budget, costs=costs)
        ends = [0, *graph.cuts, graph.num_nodes]
        return [ends[end] for end in list(accumulate(sizes))[:-1]], faults
    if isinstance(split[0], str):
        return named.cuts_at_modules(graph, split)
    return named.cuts_between_groups(graph, split)


def cut_sizes(
    graph: Cuttable,
    split: int | Sequence[int],
    *,
    balance: Balance = "time",
    budget: Budget | None = None,
    costs: ModelCosts | None = None,
) -> tuple[list[int], list[str]]:
    """Return the number of blocks per stage, and what is wrong with the split for this model."""
    ends = [0, *graph.cuts, graph.num_nodes]
    available = len(ends) - 1
    if isinstance(split, int):
        if split > available:
            why = ", which is what its marks allow" if graph.marks else ""
            return [], [
                f"split={split}: the model has {available} blocks{why}, so it can be cut into at "
                f"most {available} stages"
            ]
        return lightest_cuts(graph, split, by=balance, budget=budget or Budget(), costs=costs)
    if sum(split) != available:
        names = [" + ".join(graph.label(begin, end)) for begin, end in pairwise(ends)]
        listed = ", ".join(names if len(names) <= 20 else [*names[:10], "..", *names[-9:]])
        return [], [
            f"split={list(split)} places {sum(split)} blocks, the model has {available}: {listed}"
        ]
    return list(split), []


def _mapping_faults(split: Mapping[Any, Any]) -> list[str]:
    if not split:
        return ['split={}: wanted modules and sides, {"layers.4": "begin"}']
    faults = [f"split: {name!r} is no name of a module" for name in split if not _is_name(name)]
    return faults + [
        f"split={{{name!r}: {side!r}}}: wanted 'begin' or 'end'"
        for name, side in split.items()
        if side not in SIDES
    ]


def _list_faults(split: Sequence[Any]) -> list[str]:
    if not split:
        return ["split=[]: wanted the number of blocks of each stage, [2, 1]"]
    if all(isinstance(entry, str) for entry in split):
        return _names_faults(split)
    if all(isinstance(entry, (list, tuple)) for entry in split):
        return _groups_faults(split)
    if any(isinstance(entry, (str, list, tuple)) for entry in split):
        return [f"split={_short.repr(split)}: numbers, names and lists are mixed: {_WANTED}"]
    return [
        f"split={_short.repr(list(split))}: stage {stage} has {size!r} blocks, wanted a whole "
        "number of at least 1"
        for stage, size in enumerate(split)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]


def _names_faults(names: Sequence[str]) -> list[str]:
    faults = ["split: '' is no name of a module"] if "" in names else []
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    return faults + [f"split: {name!r} is named twice" for name in repeated]


def _groups_faults(groups: Sequence[Sequence[Any]]) -> list[str]:
    faults: list[str] = []
    stage_of: dict[str, int] = {}
    for stage, group in enumerate(groups):
        if not group:
            faults.append(f"split: stage {stage} is empty: give it a block")
        for name in group:
            if not _is_name(name):
                faults.append(f"split: stage {stage} names {name!r}, wanted the name of a block")
            elif name in stage_of:
                both = f"stage {stage_of[name]} and stage {stage}"
                faults.append(f"split: block {name!r} is assigned twice, to {both}")
            else:
                stage_of[name] = stage
    return faults


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != ""
