"""Cuts that the user named: at modules, beside their calls, between blocks, at marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from stageline.capturing.graph import Call, Cuttable, Mark

_Found = tuple[list[int], list[str]]


@dataclass(frozen=True)
class _Span:
    """What a name stands for, once: a block from where it is entered to where it is left."""

    name: str
    begin: int
    end: int
    where: str = ""


def cuts_at_modules(graph: Cuttable, names: Sequence[str]) -> _Found:
    """Return a cut before the first call of each module; names stand in forward order."""
    calls = _calls(graph)
    faults = [_unknown_module(graph, name) for name in names if name not in calls]
    if faults:
        return [], faults
    begins = [calls[name][0].begin for name in names]
    for name, begin in zip(names, begins, strict=True):
        if begin == 0:
            faults.append(
                f"split: {name!r} runs first, the stage before it would be empty: leave it out, "
                "stage 0 needs no name"
            )
        if begin == graph.num_nodes:
            faults.append(f"split: nothing is computed from {name!r} on, its stage would be empty")
    pairs = zip(names, names[1:], begins, begins[1:], strict=False)
    for name, other, begin, other_begin in pairs:
        if other_begin < begin:
            faults.append(
                f"split: {other!r} runs before {name!r}: name modules in the order they run in"
            )
        if other_begin == begin:
            faults.append(
                f"split: {name!r} and {other!r} begin at the same place, the stage between would "
                "be empty: leave one out"
            )
    return begins, faults


def cuts_beside_calls(graph: Cuttable, sides: Mapping[str, str]) -> _Found:
    """Return a cut before or after each call of each module.

    Where a cut would lie at an end of the model there is none: a loop may end the model.
    """
    calls = _calls(graph)
    faults = [_unknown_module(graph, name) for name in sides if name not in calls]
    positions = {
        call.begin if side == "begin" else call.end
        for name, side in sides.items()
        for call in calls.get(name, ())
    }
    cuts = sorted(positions - {0, graph.num_nodes})
    if not cuts and not faults:
        name, side = next(iter(sides.items()))
        place = "before" if side == "begin" else "after"
        faults = [f"split: nothing is computed {place} {name!r}, a stage there would be empty"]
    return cuts, faults


def cuts_between_groups(graph: Cuttable, groups: Sequence[Sequence[str]]) -> _Found:
    """Return a cut where each group of blocks begins.

    What lies between two blocks goes with the one before, what lies before all of them with the
    first stage. Names are those of ``Block`` marks if the model has any, else of modules.
    """
    stage_of = {name: stage for stage, group in enumerate(groups) for name in group}
    blocks = _block_spans(graph.marks)
    if blocks:
        spans, faults = blocks, _assignment_faults(blocks, stage_of)
    else:
        spans, faults = _module_spans(graph, stage_of)
    if faults:
        return [], faults
    faults = _order_faults(spans, stage_of)
    if faults:
        return [], faults
    begins = [
        min(span.begin for span in spans if stage_of[span.name] == stage)
        for stage in range(1, len(groups))
    ]
    ends = [0, *begins, graph.num_nodes]
    faults = [
        f"split: stage {stage} would be empty, its blocks compute nothing: join it with another"
        for stage in range(len(groups))
        if ends[stage] >= ends[stage + 1]
    ]
    return begins, faults


def cuts_at_marks(graph: Cuttable) -> _Found:
    """Return a cut at every mark: each CutPoint, and where a Block begins or ends.

    What lies between two blocks is a stage of its own if it calls a module; otherwise it only
    prepares values, and goes with the block before.
    """
    if not graph.marks:
        return [], [
            "split='marks': wanted a model with marks, it has none: put sl.CutPoint or sl.Block "
            "into its forward, or say how many stages, split=4"
        ]
    spans = _block_spans(graph.marks)
    order = {name: stage for stage, name in enumerate(dict.fromkeys(span.name for span in spans))}
    points, faults = _point_cuts(graph)
    faults += [
        f"split='marks': block {span.name!r}{_at(span.where)} computes nothing, its stage would "
        "be empty"
        for span in spans
        if span.begin == span.end
    ]
    faults += _order_faults(spans, order)
    if faults:
        return [], faults
    return sorted({*points, *_block_cuts(graph, spans)}), []


def _point_cuts(graph: Cuttable) -> _Found:
    faults, seen = [], dict[int, str]()
    for mark in graph.marks:
        if mark.kind != "cut":
            continue
        what = f"split='marks': CutPoint {mark.name}{_at(mark.where)}"
        if mark.begin in (0, graph.num_nodes):
            place = "before the first" if mark.begin == 0 else "after the last"
            faults.append(f"{what} lies {place} operation, a stage would be empty: remove it")
        elif mark.begin in seen:
            other = seen[mark.begin]
            faults.append(f"{what} lies where {other} does, the stage between would be empty")
        seen[mark.begin] = mark.name
    return list(seen), faults


def _block_cuts(graph: Cuttable, spans: Sequence[_Span]) -> list[int]:
    """Return where blocks begin and end; they follow each other, as was checked."""
    extents: dict[str, tuple[int, int]] = {}
    for span in spans:
        begin, end = extents.get(span.name, (span.begin, span.end))
        extents[span.name] = min(begin, span.begin), max(end, span.end)
    cuts, before = [], 0
    for begin, end in [*extents.values(), (graph.num_nodes, graph.num_nodes)]:
        if _calls_module(graph, before, begin):
            cuts += [before, begin]
        elif before:
            cuts.append(begin)
        before = end
    return [cut for cut in cuts if 0 < cut < graph.num_nodes]


def _calls_module(graph: Cuttable, begin: int, end: int) -> bool:
    return any(begin <= call.begin < call.end <= end for call in graph.calls)


def _block_spans(marks: Iterable[Mark]) -> list[_Span]:
    return [
        _Span(mark.name, mark.begin, mark.end, mark.where)
        for mark in sorted(marks, key=lambda mark: (mark.begin, mark.end))
        if mark.kind == "block"
    ]


def _assignment_faults(spans: Sequence[_Span], stage_of: Mapping[str, int]) -> list[str]:
    known = list(dict.fromkeys(span.name for span in spans))
    faults = [
        f"split: there is no block {name!r}: {_nearest(name, known)}"
        for name in stage_of
        if name not in known
    ]
    return faults + [
        f"split: block {name!r} belongs to no stage" for name in known if name not in stage_of
    ]


def _module_spans(graph: Cuttable, stage_of: Mapping[str, int]) -> tuple[list[_Span], list[str]]:
    """Return the calls of the named modules, which must cover all that has parameters."""
    calls = _calls(graph)
    faults = [_unknown_module(graph, name) for name in stage_of if name not in calls]
    wanted = [call for call in graph.calls if call.path in stage_of]
    faults += [
        f"split: {inner!r} lies inside {outer!r}: it cannot be assigned again"
        for inner in stage_of
        for outer in stage_of
        if inner.startswith(f"{outer}.")
    ]
    left_out = [
        call.path
        for call in graph.calls
        if not call.opened
        and not any(one.begin <= call.begin and call.end <= one.end for one in wanted)
        and graph.load(call.begin, call.end).parameters
    ]
    if not faults:
        faults = [f"split: {path!r} belongs to no stage" for path in dict.fromkeys(left_out)]
    spans = [_Span(call.path, call.begin, call.end) for call in wanted]
    return sorted(spans, key=lambda span: (span.begin, span.end)), faults


def _order_faults(spans: Sequence[_Span], stage_of: Mapping[str, int]) -> list[str]:
    """Return a finding for each block that runs after a later stage has begun."""
    faults: dict[str, str] = {}
    entered: set[str] = set()
    last = spans[0] if spans else None
    for span in spans:
        assert last is not None
        if stage_of[span.name] < stage_of[last.name]:
            again = "is entered again" if span.name in entered else "runs"
            faults.setdefault(
                span.name,
                f"split: block {span.name!r} of stage {stage_of[span.name]} {again}"
                f"{_at(span.where)} after block {last.name!r} of stage {stage_of[last.name]} "
                "began: stages go forward only, put both into one",
            )
        else:
            last = span
        entered.add(span.name)
    return list(faults.values())


def _at(where: str) -> str:
    return f" ({where})" if where else ""


def _calls(graph: Cuttable) -> dict[str, list[Call]]:
    calls: dict[str, list[Call]] = {}
    for call in graph.calls:
        calls.setdefault(call.path, []).append(call)
    return calls


def _unknown_module(graph: Cuttable, name: str) -> str:
    if name not in graph.module_names:
        return f"split: there is no module {name!r}: {_nearest(name, graph.module_names)}"
    inner = next((call.path for call in graph.calls if call.path.startswith(f"{name}.")), None)
    way_out = "name one that is" if inner is None else f"name one inside it, {inner!r}"
    return f"split: module {name!r} is never called itself: {way_out}"


def _nearest(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, [one for one in known if one], n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    names = [one for one in known if one]
    return f"there are {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}"
