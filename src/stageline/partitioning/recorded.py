"""Any model as the stages of a pipeline: recorded on an example, and cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from stageline.capturing.recorded import Graph, capture
from stageline.capturing.sequential import Chain
from stageline.capturing.staged import StagedModel, VariantStage
from stageline.errors import ConfigError
from stageline.partitioning import splits
from stageline.partitioning.amounts import read_bytes
from stageline.partitioning.budget import Budget
from stageline.partitioning.partition import decided, option_faults
from stageline.partitioning.plan import Plan
from stageline.partitioning.sources import StageSource, chain_source, cut_model, is_chain
from stageline.partitioning.weighing import Balance


@dataclass(frozen=True)
class Example:
    """One call of the model, what to make even when it is cut, and what ranks have and run."""

    args: Any = None
    kwargs: Any = None
    balance: Balance = "time"
    memory_limit: int | str | None = None
    budget: Budget = field(default_factory=Budget)

    @property
    def is_given(self) -> bool:
        return self.args is not None or self.kwargs is not None

    def limited(self) -> Budget:
        """Return what ranks have and run if their memory is limited; else any schedule would do."""
        if self.memory_limit is None:
            return Budget()
        return replace(self.budget, limit=read_bytes(self.memory_limit))

    def faults(self) -> list[str]:
        """Return what is wrong with it, whatever the model."""
        faults = []
        if self.args is not None and not isinstance(self.args, (tuple, list)):
            got = type(self.args).__name__
            faults.append(
                f"example_args: wanted a tuple of the arguments of one call, got {got}: (x,)"
            )
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            got = type(self.kwargs).__name__
            faults.append(f"example_kwargs: wanted a dict of keyword arguments, got {got}")
        return faults + option_faults(self.balance, self.memory_limit, None)


@dataclass(frozen=True)
class CutModel:
    """A model in stages, before they have ranks.

    Attributes:
        sources: The stages.
        staged: What runs them, if the model was recorded.
        aliases: Names of the model's tensors that no stage uses, each with one that a stage holds.
        first_names: The first name of each parameter in the model, by the names that stages use.
        plan: What was planned, if the model was recorded.
        model: The whole model; None where only its stages are known.
    """

    sources: list[StageSource] = field(default_factory=list)
    staged: StagedModel | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    first_names: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    model: nn.Module | None = None

    def order(self) -> dict[str, int]:
        """Return where each parameter stands in the model, if that is known."""
        if self.model is None:
            return {}
        return {name: index for index, (name, _) in enumerate(self.model.named_parameters())}


def cut_any(
    model: object,
    split: object,
    example: Example,
    decide: splits.Decide = splits.decide_alone,
) -> tuple[CutModel, list[str]]:
    """Cut a model as the user said; return its stages and what is wrong.

    An ``nn.Sequential`` is cut between its children; every other model is recorded. ``decide`` has
    the last word on where the cuts lie: processes that build one pipeline must agree.
    """
    faults = example.faults()
    if faults:
        return CutModel(), [*faults, *splits.find_faults(split)]
    if not isinstance(model, nn.Module) or is_chain(model) or not example.is_given:
        sources, faults = cut_model(
            model,
            split,
            balance=example.balance,
            budget=example.limited(),
            decide=decide,
        )
        if not faults or not example.is_given or not isinstance(model, nn.Module):
            whole = model if isinstance(model, nn.Module) else None
            return CutModel(sources, model=whole), faults
    faults = splits.find_faults(split)
    if faults:
        return CutModel(), faults
    try:
        graph = capture(model, tuple(example.args or ()), dict(example.kwargs or {}))
        plan = decided(
            graph,
            split,  # type: ignore[arg-type]  # find_faults has looked at it
            decide,
            example.balance,
            example.memory_limit,
            example.limited(),
        )
    except ConfigError as error:
        return CutModel(), list(error.findings)
    return cut_planned(plan), []


def cut_planned(plan: Plan) -> CutModel:
    """Return the stages of a plan."""
    staged, graph = plan.parts, plan.graph
    if not isinstance(graph, Graph):  # a chain of blocks: its stages are plain modules
        assert isinstance(graph, Chain)
        ends = pairwise([0, *plan.cuts, graph.num_nodes])
        return CutModel(
            [
                chain_source(graph, index, module, begin, end)
                for index, (module, (begin, end)) in enumerate(
                    zip(staged.stages, ends, strict=True)
                )
            ]
        )
    assert isinstance(staged, StagedModel)
    aliases = _complete(graph.model, staged)
    bounds = [0, *plan.cuts, graph.num_nodes]
    sources = [
        StageSource(
            staged.held[stage.index],
            stage.calls,
            fingerprint=graph.fingerprint,
            # Not what the plan says: processes that measured on their own would disagree.
            time=graph.load(bounds[stage.index], bounds[stage.index + 1]).time,
        )
        for stage in plan.stages
    ]
    return CutModel(sources, staged, aliases, _first_names(graph.model), plan, graph.model)


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return {name: earliest for name, earliest in names.items() if name != earliest}


def _complete(model: nn.Module, staged: StagedModel) -> dict[str, str]:
    """Give every tensor of the model to some stage, and return the names that stay without one.

    A parameter that nobody uses is trained by nobody, and still belongs into the state of the
    model: it goes to the stage of the one before it.
    """
    held: dict[int, str] = {}
    home: dict[str, VariantStage] = {}
    for _, stage in sorted(staged.held.items()):
        for name, tensor in _tensors(stage):
            held.setdefault(id(tensor), name)
            home.setdefault(name, stage)
    aliases: dict[str, str] = {}
    stage = staged.held[0]
    recording = staged.variants[0].recording
    for name, tensor in _tensors(model):
        if name in home:
            stage = home[name]
        elif id(tensor) in held:
            aliases[name] = held[id(tensor)]
        else:
            stage.place(recording, [name])
            held[id(tensor)] = name
            home[name] = stage
    return aliases


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def cut_by_plan(
    plan: object, model: object, split: object, example: Example
) -> tuple[CutModel, list[str]]:
    """Return the stages of a plan that the user made, and what contradicts it."""
    if not isinstance(plan, Plan):
        return CutModel(), [f"plan: wanted what sl.partition returns, got {type(plan).__name__}"]
    given = [
        name
        for name, value in (
            ("split", split),
            ("example_args", example.args),
            ("example_kwargs", example.kwargs),
            ("memory_limit", example.memory_limit),
        )
        if value is not None
    ]
    faults = [f"{name}: the plan has said that already: leave it out" for name in given]
    if plan.graph is None:
        return CutModel(), [*faults, "plan: it only describes a pipeline: use sl.partition(...)"]
    if model is not None and model is not plan.graph.model:
        faults.append("model: the plan is for another model: leave it out")
    return cut_planned(plan), faults
