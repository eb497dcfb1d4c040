"""The plan: which blocks form which stage, and which rank holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import nn

from stageline.capturing.graph import Crossing, Cuttable, Tie
from stageline.errors import ConfigError
from stageline.partitioning.amounts import show_bytes
from stageline.partitioning.costs import BlockCosts
from stageline.partitioning.saving import Origin, SavedPlan, differences, read_plan
from stageline.partitioning.sharing import normalises_batches
from stageline.wording import aligned, from_to, shares


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        index: The stage, in forward order.
        rank: The pipeline rank that holds it.
        device: Where it runs, for the table; "" where that is not decided.
        calls: The modules that it calls, in order, with the names of their classes.
        module: What runs; None where another process holds it.
        num_parameters: How many numbers it trains or keeps; None where another process knows.
        parameter_bytes: Their bytes, if known.
        time: Estimated nanoseconds of forward and backward, if known.
        activation_bytes: What one microbatch like the example keeps for backward, if known.
        receives: What crosses the cut before it, if known.
        has_batch_norm: Whether it had a BatchNorm that trains when the plan was made.
    """

    index: int
    rank: int
    device: str
    calls: tuple[str, ...]
    module: nn.Module | None = field(compare=False, repr=False)
    num_parameters: int | None
    parameter_bytes: int | None = None
    time: int | None = None
    activation_bytes: int | None = None
    receives: tuple[Crossing, ...] = ()
    has_batch_norm: bool = False

    @property
    def normalises_batches(self) -> bool:
        """Whether a BatchNorm in it normalises by what it is given; another process may know."""
        if self.module is None:
            return self.has_batch_norm
        return normalises_batches(self.module)


@dataclass(frozen=True)
class Plan:
    """All stages of a pipeline, in forward order.

    Attributes:
        stages: The stages.
        cuts: The positions of the graph between them.
        ties: The parameters and buffers that several stages use.
        origin: The graph it was made from; None for stages that the user made.
    """

    stages: tuple[StagePlan, ...]
    cuts: tuple[int, ...] = ()
    ties: tuple[Tie, ...] = ()
    origin: Origin | None = None
    _parts: Any = field(default=None, compare=False, repr=False)
    _graph: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        graph: Cuttable,
        cuts: Sequence[int],
        placement: Sequence[int],
        *,
        opened: Sequence[str] = (),
        opened_for: int = 1,
        costs: Sequence[BlockCosts] | None = None,
    ) -> Plan:
        """Return the plan of a graph that is cut at some positions.

        Args:
            graph: The model.
            cuts: Positions, ascending.
            placement: The rank of each stage.
            opened: The modules for which the graph was opened, so that a copy in JSON can be.
            opened_for: The number of stages for which it was opened.
            costs: What the stages cost; the graph's own estimates if None.
        """
        parts = graph.cut(cuts)
        ends = [0, *cuts, graph.num_nodes]
        stages = [
            _stage(graph, index, rank, begin, end, parts.stages[index])
            for index, (rank, (begin, end)) in enumerate(
                zip(placement, pairwise(ends), strict=True)
            )
        ]
        if costs is not None:
            stages = [_costing(stage, cost) for stage, cost in zip(stages, costs, strict=True)]
        return cls(
            tuple(stages),
            tuple(cuts),
            tuple(graph.ties(cuts)),
            Origin.of(graph, opened, opened_for),
            parts,
            graph,
        )

    @property
    def parts(self) -> Any:
        """What runs the stages; None if this only describes a pipeline."""
        return self._parts

    @property
    def graph(self) -> Any:
        """The captured model; None if this only describes a pipeline."""
        return self._graph

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def placement(self) -> tuple[int, ...]:
        """Which rank holds each stage."""
        return tuple(stage.rank for stage in self.stages)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages one after the other in this process: what the plain model returns."""
        if self._parts is None:
            raise ConfigError(
                "a run of this plan",
                ["it only describes a pipeline: call that, or sl.partition(graph, split=...)"],
            )
        return self._parts.run(args, kwargs)

    def table(self) -> str:
        """Return the plan as a table.

        Example:
            >>> plan = Plan((
            ...     StagePlan(0, 0, "cpu", ("0 Linear", "1 ReLU"), None, 110),
            ...     StagePlan(1, 1, "cpu", ("2 Linear",), None, 55),
            ... ))
            >>> print(plan.table())
            stage  rank  device  parameters  share  calls
                0     0  cpu            110   67 %  0 Linear .. 1 ReLU (2)
                1     1  cpu             55   33 %  2 Linear (1)
        """
        columns = {
            "stage": [str(stage.index) for stage in self.stages],
            "rank": [str(stage.rank) for stage in self.stages],
            "device": [stage.device for stage in self.stages],
            "parameters": [_number(stage.num_parameters) for stage in self.stages],
            "share": shares([stage.num_parameters for stage in self.stages]),
            "bytes": [_amount(stage.parameter_bytes) for stage in self.stages],
            "time": shares([stage.time for stage in self.stages]),
            "receives": [_crossing(stage.receives) for stage in self.stages],
            "calls": [_calls(stage.calls) for stage in self.stages],
        }
        optional = ("device", "bytes", "time", "receives")
        known = {
            title: cells for title, cells in columns.items() if title not in optional or any(cells)
        }
        table = aligned(known, left=("device", "receives", "calls"))
        return "\n".join([table, *map(_tie, self.ties), *_batch_norm(self.stages)])

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return the plan as text that ``from_json`` reads; it holds no weights."""
        if self.origin is None:
            raise ConfigError(
                "a copy of this plan in JSON",
                ["its stages are the user's own modules: only a plan of a graph can be saved"],
            )
        calls = tuple(stage.calls for stage in self.stages)
        return SavedPlan(self.origin, self.cuts, self.placement, calls).text()

    @classmethod
    def from_json(cls, text: str, graph: Cuttable) -> Plan:
        """Return the plan that was saved as text, for the same model.

        Args:
            text: What ``to_json`` returned.
            graph: A capture of the model; one of another model is refused.
        """
        saved, faults = read_plan(text)
        if saved is None:
            raise ConfigError("Plan.from_json", faults)
        graph = graph.opened_at(saved.origin.opened, num_stages=saved.origin.opened_for)
        faults = differences(saved, graph)
        if faults:
            raise ConfigError("Plan.from_json", faults)
        return cls.of(
            graph,
            saved.cuts,
            saved.placement,
            opened=saved.origin.opened,
            opened_for=saved.origin.opened_for,
        )


def _stage(
    graph: Cuttable, index: int, rank: int, begin: int, end: int, module: nn.Module
) -> StagePlan:
    load = graph.load(begin, end)
    return StagePlan(
        index=index,
        rank=rank,
        device="",
        calls=graph.label(begin, end),
        module=module,
        num_parameters=load.parameters,
        parameter_bytes=load.parameter_bytes,
        time=load.time,
        activation_bytes=load.activation_bytes,
        receives=tuple(graph.crossing(begin)) if begin else (),
        has_batch_norm=normalises_batches(module),
    )


def _costing(stage: StagePlan, cost: BlockCosts) -> StagePlan:
    kept = cost.input_bytes + cost.activation_bytes
    return replace(stage, time=cost.time, activation_bytes=kept)


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _amount(count: int | None) -> str:
    return "" if count is None else show_bytes(count)


def _crossing(values: Sequence[Crossing]) -> str:
    """Return the largest of the values that cross, and how many others there are.

    Example:
        >>> _crossing([Crossing("mask", "bool [4]", 4), Crossing("x", "float32 [4, 16]", 256)])
        'float32 [4, 16] +1 more, 260 B'
    """
    if not values:
        return ""
    largest = max(values, key=lambda value: value.num_bytes)
    more = f" +{len(values) - 1} more" if len(values) > 1 else ""
    return f"{largest.text}{more}, {show_bytes(sum(value.num_bytes for value in values))}"


def _calls(names: Sequence[str]) -> str:
    return f"{from_to(names)} ({len(names)})" if names else "in another process"


def _batch_norm(stages: Sequence[StagePlan]) -> list[str]:
    """Return what is to be known of the BatchNorms that train, in one line.

    Example:
        >>> _batch_norm([StagePlan(0, 0, "", ("0 BatchNorm1d",), nn.BatchNorm1d(2), 4)])[0][:59]
        'BatchNorm in stage 0: each microbatch is normalised alone; '
    """
    having = [stage.index for stage in stages if stage.normalises_batches]
    if not having:
        return []
    return [
        f"BatchNorm in {_named(having)}: each microbatch is normalised alone; running statistics "
        "are updated by each in turn, with deferred_batch_norm=True once by the whole batch"
    ]


def _tie(tie: Tie) -> str:
    counted = f", {tie.num_parameters:,} parameters counted in each" if tie.num_parameters else ""
    return f"tied: {' = '.join(tie.names)} in {_named(tie.stages)}{counted}"


def _named(stages: Sequence[int]) -> str:
    """Return stages by their numbers.

    Example:
        >>> _named([2]), _named([0, 1, 3])
        ('stage 2', 'stages 0, 1 and 3')
    """
    *first, last = map(str, stages)
    return f"stages {', '.join(first)} and {last}" if first else f"stage {last}"
