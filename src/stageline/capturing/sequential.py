"""An ``nn.Sequential`` is a chain of blocks already; nothing has to be recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from stageline.capturing.graph import Call, Crossing, Cuttable, Load, Mark, Tie
from stageline.capturing.layers import LayerList, chain_of
from stageline.capturing.marks import CutPoint, begun_block, is_own_hook
from stageline.capturing.streams.frames import Frame, Route, route_of
from stageline.capturing.streams.keys import ROOT
from stageline.capturing.streams.tracking import numbers_of
from stageline.torch_private import MODULE_HOOKS


@dataclass(frozen=True)
class Block:
    """One piece of a model.

    Attributes:
        name: Its name in the model, ``encoder.3``.
        module: The user's own module.
        path: Where its call lies, as random streams count calls.
    """

    name: str
    module: nn.Module
    path: int = field(default=0, compare=False)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def __str__(self) -> str:
        return f"{self.name} {type(self.module).__name__}"


@dataclass(frozen=True)
class ChainParts:
    """The stages of a chain, as modules."""

    stages: list[nn.Module]

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        first, *others = self.stages
        value = first(*args, **kwargs)
        for stage in others:
            value = stage(value)
        return value


class Chain(Cuttable):
    """The blocks of a model in forward order; each takes what the one before returned.

    A node is a block. Nothing has been run, so parameters stand for time, and what crosses a cut
    is not known. CutPoints among the children are marks, and no blocks.

    Attributes:
        blocks: The blocks.
        findings: What is wrong with the marks.
    """

    def __init__(self, model: nn.Sequential, opened: Iterable[str] = ()) -> None:
        self._model = model
        self._opened = frozenset(opened)
        self.blocks: list[Block] = []
        self.findings: list[str] = []
        self.calls: list[Call] = []
        self.marks: list[Mark] = []
        self._num_calls = Counter[str]()
        self.numbers = numbers_of(model)
        self._walk("", model, Frame.at(ROOT))
        self.num_nodes = len(self.blocks)
        self._mark_begun_blocks()
        positions = {end for mark in self.marks for end in (mark.begin, mark.end)}
        self.cuts = [
            position
            for position in range(1, self.num_nodes)
            if position in positions or not self.marks
        ]
        self.module_names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        self.fingerprint = self._fingerprint()

    def load(self, begin: int, end: int) -> Load:
        found = {
            id(parameter): parameter
            for block in self.blocks[begin:end]
            for parameter in block.module.parameters()
        }.values()
        count = sum(parameter.numel() for parameter in found)
        size = sum(parameter.numel() * parameter.element_size() for parameter in found)
        return Load(time=count, parameters=count, parameter_bytes=size, activation_bytes=0)

    def crossing(self, position: int) -> Sequence[Crossing]:
        return ()

    def ties(self, cuts: Sequence[int]) -> Sequence[Tie]:
        names: dict[object, list[str]] = {}
        counts: dict[object, int] = {}
        for name, tensor in _named_tensors(self._model):
            names.setdefault(_identity(tensor), []).append(name)
            counts[_identity(tensor)] = tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        stages: dict[object, set[int]] = {}
        for stage, (begin, end) in enumerate(pairwise([0, *cuts, self.num_nodes])):
            for block in self.blocks[begin:end]:
                for _, tensor in _named_tensors(block.module):
                    stages.setdefault(_identity(tensor), set()).add(stage)
        return [
            Tie(tuple(names[tensor]), tuple(sorted(users)), counts[tensor])
            for tensor, users in stages.items()
            if len(users) > 1
        ]

    def label(self, begin: int, end: int) -> tuple[str, ...]:
        return tuple(str(block) for block in self.blocks[begin:end])

    def opened_at(self, paths: Sequence[str], *, num_stages: int = 1) -> Chain:
        """Return the chain with the Sequentials opened that lie on the way to these modules."""
        outer = {
            path.rsplit(".", count)[0] for path in paths for count in range(1, path.count(".") + 1)
        }
        chain = Chain(self._model, self._opened | outer)
        while len(chain.cuts) + 1 < num_stages and not chain.marks:
            opened = Chain(self._model, chain._opened | {block.name for block in chain.blocks})
            if opened.num_nodes == chain.num_nodes and opened.blocks == chain.blocks:
                break
            chain = opened
        return chain

    def cut(self, cuts: Sequence[int]) -> ChainParts:
        ends = [0, *cuts, self.num_nodes]
        return ChainParts([self.stage_module(begin, end) for begin, end in pairwise(ends)])

    def stage_module(self, first: int, stop: int) -> nn.Sequential:
        """Return the blocks ``first`` to ``stop - 1`` as one module, under their own names."""
        return chain_of([(block.name, block.module) for block in self.blocks[first:stop]])

    def route(self, first: int, stop: int, path: int) -> Route:
        """Return where the calls of the blocks ``first`` to ``stop - 1`` lie in the model."""
        blocks = self.blocks[first:stop]
        return route_of([(self.numbers[id(b.module)], b.path) for b in blocks], path)

    def _walk(self, path: str, module: nn.Module, caller: Frame) -> None:
        """Add a module: as a block, as a mark, or, if it is opened, by what it holds."""
        begin, place = len(self.blocks), len(self.calls)
        occurrence = self._num_calls[path]
        self._num_calls[path] += 1
        if isinstance(module, CutPoint):
            self._mark_point(path, module)
            return
        frame = caller.child(self.numbers[id(module)])
        assert frame is not None
        is_opened = not path or (is_plain_sequential(module) and self._is_wanted(path, module))
        if is_opened:
            for name, child in _children(path, module):
                self._walk(name, child, frame)
        else:
            self.blocks.append(Block(path, module, frame.path))
        end = len(self.blocks)
        call = Call(path, occurrence, type(module).__name__, begin, end, is_opened)
        self.calls.insert(place, call)

    def _is_wanted(self, path: str, module: nn.Module) -> bool:
        children = [child for _, child in _children(path, module)]
        return bool(children) and (path in self._opened or any(map(_holds_mark, children)))

    def _mark_point(self, path: str, point: CutPoint) -> None:
        position = len(self.blocks)
        same = [mark for mark in self.marks if self._model.get_submodule(mark.name) is point]
        if same:
            self.findings.append(
                f"CutPoint {same[0].name} stands in the chain again, as {path}: make one for each "
                "place"
            )
        self.marks.append(Mark("cut", path, position, position))

    def _mark_begun_blocks(self) -> None:
        begun = [
            (call.begin, name)
            for call in self.calls
            if (name := begun_block(self._model.get_submodule(call.path))) is not None
        ]
        for (begin, name), (end, _) in pairwise([*begun, (self.num_nodes, "")]):
            self.marks.append(Mark("block", name, begin, end))
        self.marks.sort(key=lambda mark: (mark.begin, mark.end))

    def _fingerprint(self) -> str:
        tensors = [
            (name, tuple(tensor.shape), str(tensor.dtype))
            for name, tensor in _named_tensors(self._model)
        ]
        facts = ([str(block) for block in self.blocks], tensors)
        return sha256(repr(facts).encode()).hexdigest()[:16]


def capture_sequential(model: nn.Sequential, *, at_least: int = 1) -> Chain:
    """Return the children of a Sequential as blocks.

    Args:
        model: The model; it is not changed.
        at_least: How many blocks are wanted. If the model has fewer children, Sequentials among
            them are opened as well.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
        >>> [block.name for block in capture_sequential(model).blocks]
        ['0', '1']
        >>> [block.name for block in capture_sequential(model, at_least=3).blocks]
        ['0.0', '0.1', '1']
    """
    return Chain(model).opened_at((), num_stages=at_least)


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module is a Sequential and nothing more: no forward of its own, no hooks."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward in (nn.Sequential.forward, LayerList.forward)
        and "forward" not in vars(module)  # some libraries replace it on the object
        and not has_hooks(module)
        and not own_tensors(module)
    )


def own_tensors(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that the module itself holds."""
    return [*module._parameters, *module._buffers]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward; the hooks of marks do nothing."""
    return any(
        not is_own_hook(hook) for hooks in MODULE_HOOKS for hook in getattr(module, hooks).values()
    )


def _children(prefix: str, model: nn.Module) -> list[tuple[str, nn.Module]]:
    start = f"{prefix}." if prefix else ""
    if isinstance(model, LayerList):
        return [(f"{start}{name}", layer) for name, layer in zip(model.order, model, strict=True)]
    # Not named_children(), which leaves out a module that stands in the chain for the second time.
    return [
        (f"{start}{name}", child) for name, child in model._modules.items() if child is not None
    ]


def _holds_mark(module: nn.Module) -> bool:
    """Whether a chain of Sequentials leads from a module to a mark."""
    if isinstance(module, CutPoint) or begun_block(module) is not None:
        return True
    return is_plain_sequential(module) and any(
        _holds_mark(child) for _, child in _children("", module)
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _identity(tensor: Tensor) -> object:
    """Return what is equal for two tensors over the same memory."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    try:
        return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or not yet initialized
        return id(tensor)
