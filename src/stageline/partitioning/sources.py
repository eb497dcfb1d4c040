"""What stages are made of: the blocks of a model, or modules and functions that the user cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from stageline.capturing.sequential import (
    capture_sequential,
    has_hooks,
    is_plain_sequential,
    own_tensors,
)
from stageline.partitioning import splits

StageLike = nn.Module | Callable[..., Any]


class FunctionStage(nn.Module):
    """A stage without parameters that the user gave as a plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def extra_repr(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))


@dataclass(frozen=True)
class StageSource:
    """One stage as it was described, before it has a rank.

    Attributes:
        module: What it runs; None where another process has it.
        blocks: What it consists of, for people.
        prefix: What the names of its parameters begin with.
    """

    module: nn.Module | None
    blocks: tuple[str, ...]
    prefix: str = ""


def cut_model(model: object, split: object) -> tuple[list[StageSource], list[str]]:
    """Cut a Sequential as the user said; return its stages and what is wrong."""
    faults = [*_model_faults(model), *splits.find_faults(split)]
    if faults:
        return [], faults
    assert isinstance(model, nn.Sequential)
    assert isinstance(split, (int, list, tuple))
    graph = capture_sequential(model, at_least=split if isinstance(split, int) else 1)
    sizes, faults = splits.cut_sizes(graph, split)
    stages, first = [], 0
    for size in sizes:
        blocks = tuple(str(block) for block in graph.blocks[first : first + size])
        stages.append(StageSource(graph.stage_module(first, first + size), blocks))
        first += size
    return stages, faults


def _model_faults(model: object) -> list[str]:
    wanted = "give its pieces to sl.Pipeline.from_stages([...])"
    if not isinstance(model, nn.Module):
        return [f"model: wanted an nn.Sequential, got {type(model).__name__}"]
    if not isinstance(model, nn.Sequential):
        return [f"model: wanted an nn.Sequential, got {type(model).__name__}: {wanted}"]
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
        return [f"model: {name} has a forward of its own, which cannot be cut: {wanted}"]
    if not len(model):
        return ["model: it has no children"]
    return _material_faults("", model)


def _material_faults(prefix: str, module: nn.Module) -> list[str]:
    """Return a fault for every tensor that does not exist yet."""
    faults = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            faults.append(
                f"{prefix}{name} is uninitialized (a lazy layer): call the model on a batch first"
            )
        elif tensor.is_meta:
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
    return sources, faults


def _stage_faults(index: int, stage: object) -> list[str]:
    where = f"stages[{index}]"
    if stage is None:
        return []
    if isinstance(stage, nn.Module):
        return _material_faults(f"{where}: ", stage)
    if isinstance(stage, type):
        name = stage.__name__
        return [f"{where}: wanted a module or a function, got the class {name}: write {name}()"]
    if not callable(stage):
        return [f"{where}: wanted a module or a function, got {type(stage).__name__}"]
    owner = getattr(stage, "__self__", None)
    if isinstance(owner, nn.Module):
        return [
            f"{where}: a method of a {type(owner).__name__}, whose parameters nobody would find: "
            "pass the module itself"
        ]
    return [
        f"{where}: a function that uses {name}, a {type(value).__name__} with parameters or "
        "buffers that nobody would find: pass the module itself, or a module that holds it"
        for name, value in _used_by(stage)
        if _has_state(value)
    ]


def _used_by(function: Any) -> Iterator[tuple[str, object]]:
    """Yield what a function can reach by name: arguments of a partial, closure, globals."""
    if isinstance(function, partial):
        yield getattr(function.func, "__name__", "the partial's function"), function.func
        yield from ((f"argument {index}", value) for index, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _used_by(function.func)
        return
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that is still empty
            yield name, cell.cell_contents
    known = function.__globals__
    yield from ((name, known[name]) for name in code.co_names if name in known)


def _has_state(value: object) -> bool:
    if isinstance(value, nn.Module):
        trains = any(parameter.requires_grad for parameter in value.parameters())
        return trains or any(True for _ in value.buffers())
    return isinstance(value, nn.Parameter) and value.requires_grad


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
    module = stage if isinstance(stage, nn.Module) else FunctionStage(stage)
    name = module.extra_repr() if isinstance(module, FunctionStage) else type(module).__name__
    return StageSource(module, (name,), prefix)
