"""A proposal as JSON: a plan, a schedule by its name or row by row, and what was predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from torch import nn

from stageline.capturing.graph import Cuttable
from stageline.capturing.recorded import capture
from stageline.errors import ConfigError, ScheduleError
from stageline.partitioning.json_form import JsonForm
from stageline.partitioning.saving import SavedPlan, differences, read_plan
from stageline.planning.candidates import AUTO, Method
from stageline.planning.proposal import Prediction, Proposal
from stageline.scheduling import Schedule, parse

_FORM = JsonForm("proposal")
_WHAT = "Proposal.from_json"


def proposal_text(proposal: Proposal) -> str:
    """Return a proposal as JSON."""
    is_known = proposal.method.schedule != AUTO
    entries = {
        "schedule": proposal.method.schedule,
        "stages_per_rank": proposal.method.stages_per_rank,
        "recompute": proposal.method.recompute,
        "num_ranks": proposal.num_ranks,
        "num_microbatches": proposal.num_microbatches,
        "rows": proposal.rows,
        "data_parallel": proposal.data_parallel,
        "sizes": proposal.sizes,
        "placement": proposal.placement,
        "predicted": asdict(proposal.predicted),
        "costs": proposal.origin,
        "actions": None if is_known else proposal.schedule.text(),
        "plan": _plan(proposal),
    }
    return _FORM.text(entries)


def _plan(proposal: Proposal) -> Any:
    if not proposal.has_graph:
        return None
    saved = SavedPlan.of(
        proposal.graph, proposal.cuts, proposal.placement, opened_for=proposal.opened_for
    )
    return json.loads(saved.text())


def read_proposal(
    text: object,
    model: Any,
    example_args: tuple[Any, ...] | None,
    example_kwargs: Mapping[str, Any] | None,
) -> Proposal:
    """Return the proposal that a text holds."""
    entries, faults = _FORM.entries(text)
    if faults:
        raise ConfigError(_WHAT, faults)
    graph, opened_for = _graph(entries, model, example_args, example_kwargs)
    try:
        return _read(entries, graph, opened_for)
    except (KeyError, TypeError, ValueError, ScheduleError) as cause:
        raise ConfigError(
            _WHAT, [f"an entry is missing or wrong ({cause}): make the proposal anew"]
        ) from cause


def _read(entries: dict[str, Any], graph: Cuttable | None, opened_for: int) -> Proposal:
    method = Method(entries["schedule"], entries["stages_per_rank"], entries["recompute"])
    predicted: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entries["predicted"].items()
    }
    proposal = Proposal(
        sizes=tuple(entries["sizes"]),
        placement=tuple(entries["placement"]),
        schedule=_schedule(entries, method),
        method=method,
        num_microbatches=entries["num_microbatches"],
        rows=entries["rows"],
        data_parallel=entries["data_parallel"],
        predicted=Prediction(**predicted),
        origin=entries["costs"],
        _graph=graph,
        _opened_for=opened_for,
    )
    if proposal.schedule.placement != proposal.placement:
        raise ValueError("the schedule places stages elsewhere than the plan")
    return proposal


def _schedule(entries: dict[str, Any], method: Method) -> Schedule:
    if entries["actions"] is None:
        return method.build(entries["num_ranks"], entries["num_microbatches"])
    return parse(entries["actions"], name=AUTO).check()


def _graph(
    entries: dict[str, Any],
    model: Any,
    example_args: tuple[Any, ...] | None,
    example_kwargs: Mapping[str, Any] | None,
) -> tuple[Cuttable | None, int]:
    """Return the captured model, if one was given and it is the one of the plan."""
    if model is None:
        return None, 1
    if entries.get("plan") is None:
        raise ConfigError(_WHAT, ["model: the proposal was made from costs alone: leave it out"])
    saved, faults = read_plan(json.dumps(entries["plan"]))
    if saved is None:
        raise ConfigError(_WHAT, faults)
    if isinstance(model, nn.Module):
        model = capture(model, tuple(example_args or ()), example_kwargs)
    if not isinstance(model, Cuttable):
        got = type(model).__name__
        raise ConfigError(_WHAT, [f"model: wanted a module or what sl.capture returns, got {got}"])
    graph = model.opened_at(saved.origin.opened, num_stages=saved.origin.opened_for)
    faults = differences(saved, graph)
    ends = [*accumulate(entries.get("sizes", ()))][:-1]
    if not faults and [*saved.cuts] != [graph.cuts[end - 1] for end in ends]:
        faults = ["sizes: they are not those of the plan: make the proposal anew"]
    if faults:
        raise ConfigError(_WHAT, faults)
    return graph, saved.origin.opened_for
