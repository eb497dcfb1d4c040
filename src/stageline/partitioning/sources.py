"""What stages are made of: the blocks of a model, or modules and functions that the user cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from stageline.capturing.layers import FunctionModule, function_faults
from stageline.capturing.marks import CutPoint
from stageline.capturing.naming import named_everywhere
from stageline.capturing.sequential import Chain, has_hooks, is_plain_sequential, own_tensors
from stageline.capturing.streams.frames import Event, Frame, Route, route_of
from stageline.capturing.streams.keys import MODEL, ROOT, inside, number_of
from stageline.capturing.streams.tracking import numbers_of
from stageline.partitioning import splits
from stageline.partitioning.budget import Budget
from stageline.partitioning.weighing import Balance

StageLike = nn.Module | Callable[..., Any]


@dataclass(frozen=True)
class StageSource:
    """One stage as it was described, before it has a rank.

    Attributes:
        module: What it runs; None where another process has it.
        calls: The modules that it calls, for people.
        prefix: What the names of its parameters begin with.
        fingerprint: A digest of the recording it was cut from, if there is one.
        numbers: What random streams call its modules, by identity.
        route: Where in the whole model its calls lie, for random streams.
        time: How long it takes, estimated, compared with the other stages; None if not known.
    """

    module: nn.Module | None
    calls: tuple[str, ...]
    prefix: str = ""
    fingerprint: str = ""
    numbers: Mapping[int, int] = field(default_factory=dict)
    route: Route | None = None
    time: int | None = None


def is_chain(model: object) -> bool:
    """Whether a model can be cut between its children without being recorded."""
    return isinstance(model, nn.Module) and is_plain_sequential(model) and len(model) > 0  # type: ignore[arg-type]  # a Sequential


def cut_model(
    model: object,
    split: object,
    *,
    balance: Balance = "time",
    budget: Budget | None = None,
    decide: splits.Decide = splits.decide_alone,
) -> tuple[list[StageSource], list[str]]:
    """Cut a Sequential as the user said; return its stages and what is wrong."""
    faults = [*_model_faults(model), *splits.find_faults(split)]
    if faults:
        return [], faults
    assert isinstance(model, nn.Sequential)
    num_stages = split if isinstance(split, int) else 1
    chain = Chain(model).opened_at(splits.paths_wanted(split), num_stages=num_stages)
    faults = [*chain.findings, *_hidden_marks(model, chain, split)]
    if not chain.num_nodes:
        faults.append("model: it has no children but CutPoints")
    if faults:
        return [], faults
    cuts, faults = decide(
        chain, partial(splits.resolve, chain, split, balance=balance, budget=budget)
    )
    if faults:
        return [], faults
    ends = [0, *cuts, chain.num_nodes]
    modules = chain.cut(cuts).stages
    return [
        chain_source(chain, index, module, begin, end)
        for index, (module, (begin, end)) in enumerate(zip(modules, pairwise(ends), strict=True))
    ], []


def chain_source(chain: Chain, index: int, module: nn.Module, begin: int, end: int) -> StageSource:
    """Return a stage of a chain: some of its blocks."""
    route = chain.route(begin, end, path_of_stage(index))
    return StageSource(
        module,
        chain.label(begin, end),
        numbers=chain.numbers,
        route=route,
        time=chain.load(begin, end).time,
    )


def path_of_stage(index: int) -> int:
    """Return where that lies which belongs to a stage, and to no module of the model."""
    return inside(ROOT, number_of("stage"), index)


def _hidden_marks(model: nn.Module, chain: Chain, split: object) -> list[str]:
    """Return a fault for every CutPoint that only a recording would reach, if it matters."""
    if split != "marks" and not isinstance(split, int):
        return []
    seen = {mark.name for mark in chain.marks}
    return [
        f"CutPoint {name} lies inside a child of the model and is found only when the model runs: "
        "give example_args"
        for name, module in named_everywhere(model).items()
        if isinstance(module, CutPoint) and name not in seen
    ]


def _model_faults(model: object) -> list[str]:
    wanted = "give the arguments of one call, example_args=(x,), so that it can be recorded"
    if not isinstance(model, nn.Module):
        return [f"model: wanted a module, got {type(model).__name__}"]
    if not isinstance(model, nn.Sequential):
        return [f"model: {type(model).__name__} is no nn.Sequential: {wanted}"]
    if has_hooks(model):
        return [
            "model: it has hooks of its own, which no stage would call: remove them, or put them "
            "on its children"
        ]
    own = own_tensors(model)
    if own:
        return [
            f"model: it holds {', '.join(own)} itself, which would belong to no stage: move it "
            "into one of its children"
        ]
    if not is_plain_sequential(model):
        name = type(model).__name__
        return [f"model: {name} has a forward of its own: {wanted}"]
    if not len(model):
        return ["model: it has no children"]
    return _material_faults("", model, may_be_meta=True)


def _material_faults(prefix: str, module: nn.Module, *, may_be_meta: bool = False) -> list[str]:
    """Return a fault for every tensor that does not exist yet."""
    faults = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            faults.append(
                f"{prefix}{name} is uninitialized (a lazy layer): call the model on a batch first"
            )
        elif tensor.is_meta and not may_be_meta:
            faults.append(
                f"{prefix}{name} is on the meta device: materialise the model first, to_empty(...)"
            )
    return faults


def read_stages(
    stages: Sequence[StageLike | None] | Mapping[int, StageLike], num_stages: int | None
) -> tuple[list[StageSource], list[str]]:
    """Return the stages that the user made, and what is wrong with them."""
    listed, faults = _listed(stages, num_stages)
    sources = []
    for index, stage in enumerate(listed):
        wrong = _stage_faults(index, stage)
        faults += wrong
        if not wrong:
            sources.append(_source(index, stage))
    return _with_routes(sources), faults


def _with_routes(sources: list[StageSource]) -> list[StageSource]:
    """Name the modules of the stages as those of ``nn.Sequential(*stages)``."""
    whole = nn.Module()
    whole._modules.update({s.prefix[:-1]: s.module for s in sources if s.module is not None})
    numbers = numbers_of(whole)
    caller = Frame.at(MODEL)
    routed = []
    for index, source in enumerate(sources):
        events: list[Event] = []
        if source.module is not None:
            number = numbers[id(source.module)]
            frame = caller.child(number)
            assert frame is not None
            events.append((number, frame.path))
        route = route_of(events, path_of_stage(index))
        routed.append(replace(source, numbers=numbers, route=route))
    return routed


def _stage_faults(index: int, stage: object) -> list[str]:
    where = f"stages[{index}]"
    if stage is None:
        return []
    if isinstance(stage, nn.Module):
        return _material_faults(f"{where}: ", stage)
    return function_faults(where, stage)


def _listed(stages: Any, num_stages: object) -> tuple[list[StageLike | None], list[str]]:
    if num_stages is not None and (isinstance(num_stages, bool) or not isinstance(num_stages, int)):
        return [], [f"num_stages={num_stages!r}: wanted a whole number of at least 1"]
    if isinstance(num_stages, int) and num_stages < 1:
        return [], [f"num_stages={num_stages}: wanted a whole number of at least 1"]
    if isinstance(stages, Mapping):
        return _listed_mapping(stages, num_stages)
    if isinstance(stages, nn.Module) and not isinstance(stages, (nn.Sequential, nn.ModuleList)):
        return [], ["stages: wanted a list of stages, got one module: put it into a list"]
    if isinstance(stages, str) or not isinstance(stages, Iterable):
        return [], [f"stages: wanted a list of stages, got {type(stages).__name__}"]
    listed = list(stages)
    if not listed:
        return [], ["stages: the list is empty"]
    if num_stages not in (None, len(listed)):
        return listed, [f"stages: the list has {len(listed)} entries, num_stages={num_stages}"]
    return listed, []


def _listed_mapping(
    stages: Mapping[int, StageLike], num_stages: int | None
) -> tuple[list[StageLike | None], list[str]]:
    if num_stages is None:
        return [], [
            "stages: a mapping names only some stages: say how many there are, num_stages=4"
        ]
    strange = [key for key in stages if not isinstance(key, int) or not 0 <= key < num_stages]
    faults = [f"stages: {key!r} is no stage of 0..{num_stages - 1}" for key in strange]
    return [stages.get(index) for index in range(num_stages)], faults


def _source(index: int, stage: StageLike | None) -> StageSource:
    prefix = f"{index}."
    if stage is None:
        return StageSource(None, (), prefix)
    module = stage if isinstance(stage, nn.Module) else FunctionModule(stage)
    name = module.extra_repr() if isinstance(module, FunctionModule) else type(module).__name__
    return StageSource(module, (name,), prefix)


def held_modules(sources: Sequence[StageSource]) -> list[tuple[int, str, nn.Module]]:
    """Return index, name prefix and module of each stage that this process was given."""
    return [(i, s.prefix, s.module) for i, s in enumerate(sources) if s.module is not None]
