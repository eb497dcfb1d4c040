"""A plan as JSON: cuts and ranks, and by what the model is known again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from stageline.capturing.graph import Cuttable
from stageline.partitioning.json_form import JsonForm

_FORM = JsonForm("plan")


@dataclass(frozen=True)
class Origin:
    """The graph that a plan was made from.

    Attributes:
        fingerprint: The graph's digest of structure and names.
        num_nodes: How many nodes it had.
        num_modules: How many modules the model had.
        opened: The modules for which it was opened.
        opened_for: The number of stages for which it was opened.
    """

    fingerprint: str
    num_nodes: int
    num_modules: int
    opened: tuple[str, ...] = ()
    opened_for: int = 1

    @classmethod
    def of(cls, graph: Cuttable, opened: Sequence[str], opened_for: int) -> Origin:
        num_modules = len(graph.module_names)
        return cls(graph.fingerprint, graph.num_nodes, num_modules, tuple(opened), opened_for)


@dataclass(frozen=True)
class SavedPlan:
    """What is in the file.

    Attributes:
        origin: By what the graph is known again.
        cuts: Its positions between the stages.
        placement: The rank of each stage.
        calls: What each stage calls, to say what differs in another model.
    """

    origin: Origin
    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    calls: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls,
        graph: Cuttable,
        cuts: Sequence[int],
        placement: Sequence[int],
        opened: Sequence[str] = (),
        opened_for: int = 1,
    ) -> SavedPlan:
        """Return what a file would hold of a graph that is cut so, without cutting it."""
        calls = (graph.label(*span) for span in pairwise([0, *cuts, graph.num_nodes]))
        origin = Origin.of(graph, opened, opened_for)
        return cls(origin, tuple(cuts), tuple(placement), tuple(calls))

    def text(self) -> str:
        """Return the plan as JSON, a line for each entry."""
        entries = {
            "fingerprint": self.origin.fingerprint,
            "num_nodes": self.origin.num_nodes,
            "num_modules": self.origin.num_modules,
            "opened": self.origin.opened,
            "opened_for": self.origin.opened_for,
            "cuts": self.cuts,
            "placement": self.placement,
            "calls": self.calls,
        }
        return _FORM.text(entries)


def read_plan(text: object) -> tuple[SavedPlan | None, list[str]]:
    """Return the plan that a text holds, or what is wrong with the text."""
    entries, faults = _FORM.entries(text)
    if faults:
        return None, faults
    faults = [
        f"entry {key!r}: wanted {wanted}, got {entries.get(key)!r}"
        for key, wanted, fits in _WANTED
        if not fits(entries.get(key))
    ]
    if faults:
        return None, faults
    origin = Origin(
        entries["fingerprint"],
        entries["num_nodes"],
        entries["num_modules"],
        tuple(entries["opened"]),
        entries["opened_for"],
    )
    cuts, placement = tuple(entries["cuts"]), tuple(entries["placement"])
    calls = tuple(tuple(names) for names in entries["calls"])
    ends = (0, *cuts, origin.num_nodes)
    if any(begin >= end for begin, end in pairwise(ends)):
        faults.append(f"entry 'cuts': {list(cuts)} is no ascending list below {ends[-1]} nodes")
    if not len(placement) == len(calls) == len(cuts) + 1:
        faults.append(
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, but {len(placement)} have a rank and "
            f"{len(calls)} have calls"
        )
    return (None, faults) if faults else (SavedPlan(origin, cuts, placement, calls), [])


def differences(saved: SavedPlan, graph: Cuttable) -> list[str]:
    """Return how a graph differs from the one that a plan was made from."""
    here = Origin.of(graph, saved.origin.opened, saved.origin.opened_for)
    if here == saved.origin:
        return []
    then = saved.origin
    findings = [
        "the plan was made for another model: "
        f"fingerprint {then.fingerprint}, {then.num_nodes} nodes, {then.num_modules} modules; "
        f"this graph has fingerprint {here.fingerprint}, {here.num_nodes} nodes, "
        f"{here.num_modules} modules: make a new plan, sl.partition(graph, ...)"
    ]
    return findings + _first_difference(saved, graph)


def _first_difference(saved: SavedPlan, graph: Cuttable) -> list[str]:
    """Say where the calls begin to differ, if they do."""
    ends = [min(end, graph.num_nodes) for end in (0, *saved.cuts, saved.origin.num_nodes)]
    for stage, (begin, end) in enumerate(pairwise(ends)):
        here = graph.label(begin, end) if begin < end else ()
        for was, now in zip_longest(saved.calls[stage], here, fillvalue="nothing"):
            if was != now:
                return [f"stage {stage} had {was} where this graph has {now}"]
    return []


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(_is_count(one) for one in value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_WANTED = (
    ("fingerprint", "a text", lambda value: isinstance(value, str)),
    ("num_nodes", "a number", _is_count),
    ("num_modules", "a number", _is_count),
    ("opened", "names", _is_names),
    ("opened_for", "a number", _is_count),
    ("cuts", "positions", _is_counts),
    ("placement", "a rank for each stage", _is_counts),
    (
        "calls",
        "names for each stage",
        lambda value: isinstance(value, list) and all(_is_names(one) for one in value),
    ),
)
