"""The recorder: a model runs eagerly, and what its opened code does becomes a graph.

    opened module     its forward runs as always; each torch function in it is one node
    unopened module   one node, whatever happens inside

Values are the real tensors of this run, known by identity. Numbers that depend on them are symbols
(symbols.py), and each decision of the code becomes a guard (guards.py).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from stageline.capturing import calls
from stageline.capturing.abstract import without_numbers
from stageline.capturing.binding import Bindings
from stageline.capturing.graph import Call
from stageline.capturing.guards import check, check_structure, structure
from stageline.capturing.marks import CutPoint, MarkLog
from stageline.capturing.meter import Meter
from stageline.capturing.names import ModelNames
from stageline.capturing.places import where
from stageline.capturing.regions import Regions
from stageline.capturing.streams.frames import RouteLog, here
from stageline.capturing.streams.functions import DRAWING
from stageline.capturing.symbols import Size, is_symbol, plain, symbol
from stageline.capturing.values import access_paths, flatten, unflatten
from stageline.errors import CaptureError
from stageline.torch_private import DisableTorchFunction, functorch_level
from stageline.wording import a_kind

_FIXED = (str, torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


class Recorder(TorchFunctionMode):
    """Records one run of a model.

    Attributes:
        graph: The nodes so far.
        calls: Every call of a module in opened code, opened or not.
        marks: What marks were reached.
        hidden_marks: Unopened modules in which a mark was reached.
        bindings: Which tensor is which node.
        regions: Which no_grad and autocast regions are entered.
        route: Where in the model opened code calls modules and draws random numbers.
    """

    def __init__(self, names: ModelNames, opened: frozenset[str]) -> None:
        super().__init__()
        self.graph = FxGraph()
        self.names = names
        self.opened = opened
        self.calls: list[Call] = []
        self.marks = MarkLog(names.model, position=self.position)
        self.hidden_marks: list[str] = []
        self.asks_for_grad = False
        self.checkpoints: list[str] = []
        self.failures: list[str] = []
        self.random_modules: list[str] = []
        self.flags: dict[tuple[int, str], None] = {}
        self.random_state: Callable[[], Any] = lambda: None
        self.meter: Meter | None = None
        self.regions = Regions()
        self.route = RouteLog(opened)
        self.bindings = Bindings(self)
        self._thread = threading.get_ident()
        self.inside: list[str] = []  # what runs unrecorded: an unopened module, a torch function
        self._occurrences: dict[str, int] = {}
        self._pure: dict[Any, Any] = {}
        self._guarded: set[tuple[Node, str]] = set()
        self._last_random: Any = None

    # -- where the recording stands

    @property
    def is_open(self) -> bool:
        """Whether what this thread does now is recorded."""
        return not self.inside and threading.get_ident() == self._thread

    def position(self) -> int:
        return len(self.bindings.nodes)

    @contextmanager
    def unrecorded(self, what: str) -> Iterator[None]:
        self.inside.append(what)
        try:
            yield
        finally:
            self.inside.pop()

    # -- torch functions

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            _note_draw(func)
            return self.bindings.watched(func, args, kwargs)
        answer = calls.SPECIAL.get(func)
        if answer is not None:
            return answer(self, func, args, kwargs)
        return self.call_function(func, args, kwargs)

    def call_function(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a torch function and record it as one node."""
        if functorch_level() is not None:
            raise CaptureError(
                f"{where()}: a torch.func transform runs here, whose inside cannot be recorded: "
                "move it into a module of its own that is not cut"
            )
        name = calls.name_of(func)
        before = self.bindings.versions((args, kwargs))
        fx_args, fx_kwargs = self.to_nodes(args), self.to_nodes(kwargs)
        real_args, real_kwargs = self.bindings.real((args, kwargs))
        _note_draw(func)
        with self.unrecorded(name), self._noting_failure():
            result = func(*real_args, **real_kwargs)
        node = self.emit(*calls.spelled(func, fx_args), fx_kwargs)
        self.bindings.note_mutations(node, before)
        return self._bound_result(node, result, before)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """An error that the code catches is a decision that no guard could check."""
        try:
            yield
        except Exception:
            self.failures.append(where())
            raise

    def call_opaque(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Run a Python function unrecorded, as one node: a custom autograd function, a vmap."""
        with DisableTorchFunction():
            before = self.bindings.versions((args, kwargs))
            fx_args, fx_kwargs = self.to_nodes(args), self.to_nodes(kwargs)
            real_args, real_kwargs = self.bindings.real((args, kwargs))
            self.bindings.begin_leaf((args, kwargs))
        self.bindings.leaf_paths.append("")
        with self.unrecorded(name):
            result = func(*real_args, **real_kwargs)
        with DisableTorchFunction():
            self.bindings.end_leaf()
            node = self.emit("call_function", calls.named(func, name), fx_args, fx_kwargs)
            self.bindings.note_mutations(node, before)
            return self._bound_result(node, result, before)

    def emit(self, op: str, target: Any, args: Any, kwargs: Any) -> Node:
        """Append a node."""
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs))
        node.meta["where"] = where()
        node.meta["regions"] = self.regions.current()
        node.meta["reading"] = None if self.meter is None else self.meter.take()
        node.meta["route"] = self.route.take()
        self.bindings.nodes.append(node)
        self.bindings.note_order(node)
        return node

    # -- what a node gave

    def _bound_result(self, node: Node, result: Any, before: Any) -> Any:
        """Bind the tensors of a result, make symbols of its numbers, guard everything else."""
        if isinstance(result, torch.Size):
            parts = [self.pure(operator.getitem, node, i) for i in range(len(result))]
            for part in parts:
                part.meta["number"] = True
            sizes = [symbol(self, part, n) for part, n in zip(parts, result, strict=True)]
            return torch.Size(sizes)
        if isinstance(result, (torch.device, torch.Generator)):
            return self.bindings.real_device(result)
        leaves, spec = flatten(result)
        if len(leaves) == 1 and leaves[0] is result:
            return self._bound_leaf(node, result, before)
        if type(result) in (tuple, list) and node.op != "call_module":
            # How many parts unbind, split and the like give depends on sizes.
            count = self.pure(calls.length, node)
            count.meta["number"] = True
            self.guard(count, len(result))
        bound = [
            self._bound_leaf(self._reach(node, path), leaf, before)
            if not isinstance(leaf, _FIXED)
            else leaf
            for path, leaf in access_paths(result)
        ]
        if all(new is old for new, old in zip(bound, leaves, strict=True)):
            return result
        return unflatten(bound, spec)

    def _bound_leaf(self, node: Node, leaf: Any, before: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.bindings.bind(leaf, node, before)
        if type(leaf) in (int, float):
            node.meta["number"] = True
            return symbol(self, node, leaf)
        if leaf is None:
            return None
        if isinstance(leaf, (bool, *_FIXED)):
            node.meta["number"] = True
            self.guard(node, leaf)
            return leaf
        if node.op == "call_module" or node.target in (operator.getitem, getattr):
            self.bindings.bind_opaque(leaf, node)
            return leaf
        raise CaptureError(
            f"{where()}: the code makes {a_kind(leaf)} of a recorded tensor, which cannot "
            "be followed: move this into a module of its own that is not cut"
        )

    def _reach(self, node: Node, path: Sequence[tuple[str, Any]]) -> Node:
        for how, key in path:
            node = self.pure(operator.getitem if how == "item" else getattr, node, key)
        return node

    def pure(self, function: Callable[..., Any], *operands: Any) -> Node:
        """Return a node for a computation without effects, the same one for the same operands."""
        key = (function, *((type(operand), operand) for operand in operands))
        node = self._pure.get(key)
        if node is None:
            node = self.emit("call_function", function, operands, {})
            node.meta["pure"] = True
            self._pure[key] = node
        return node

    # -- symbols and guards

    def compute(self, function: Callable[..., Any], *operands: Any) -> Any:
        self.refuse_hidden_number()
        value = function(*(plain(operand) for operand in operands))
        nodes = [operand.fx_node if is_symbol(operand) else operand for operand in operands]
        node = self.pure(function, *nodes)
        if type(value) not in (int, float, bool):
            raise CaptureError(f"{where()}: {function.__name__} of sizes gives {value!r}")
        node.meta["number"] = True
        if isinstance(value, bool):
            return self._decided(node, value)
        return symbol(self, node, value)

    def decide(self, symbol: Any, outcome: Any) -> Any:
        return self._decided(symbol.fx_node, outcome)

    def _decided(self, node: Node, outcome: Any) -> Any:
        if self.is_open:
            self.guard(node, outcome)
        else:
            self.refuse_hidden_number()
        return outcome

    def refuse_hidden_number(self) -> None:
        """Raise if a module that is not opened came to a number by another way than its call."""
        if self.inside and threading.get_ident() == self._thread:
            raise CaptureError(
                f"{where()}: a module that is not opened uses a number of this run that it was not "
                "given as an argument: pass it"
            )

    def guard(self, node: Node, outcome: Any) -> None:
        key = (node, repr(outcome))
        if key not in self._guarded:
            self._guarded.add(key)
            self.emit("call_function", check, (node, outcome, where()), {})

    def size_of(self, tensor: Tensor, dim: int) -> Size:
        """Return one size of a recorded tensor as a symbol."""
        node = self.bindings.node_of(tensor)
        source, dim_there = self._size_source(node, dim)
        node = self.pure(calls.size, source, dim_there)
        node.meta["number"] = True
        return Size(self, node, tensor.shape[dim])

    def _size_source(self, node: Node, dim: int) -> tuple[Node, int]:
        """Return where a size comes from, if that is known: a decision is then one about inputs."""
        if node.op == "call_module" and not node.kwargs and len(node.args) == 1:
            module, used = self.names.module(str(node.target)), node.args[0]
            is_lookup = type(module) is nn.Embedding and isinstance(used, Node)
            if is_lookup and dim < len(used.meta.get("shape", ())):  # type: ignore[union-attr]  # a Node
                return self._size_source(used, dim)  # type: ignore[arg-type]  # a Node
        return node, dim

    def to_nodes(self, value: Any) -> Any:
        return self.bindings.to_nodes(value)

    # -- calls of modules

    def call_module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Carry out a call of a module: open it, or record it as one node."""
        if not self.is_open:
            return call(*args, **kwargs)
        # A module that the code makes as it goes, such as a loss: what it does is the code's doing.
        # And so is the forward of a parent class, called without the module's own around it.
        is_whole = getattr(call, "is_whole", True)
        if isinstance(module, CutPoint) or self.bindings.is_new(module) or not is_whole:
            return call(*args, **kwargs)
        path = self.names.path_of(module)
        occurrence = self._occurrences.get(path, 0)
        self._occurrences[path] = occurrence + 1
        opened = path in self.opened
        index = len(self.calls)
        begin = self.position()
        kind = type(module).__name__
        self.calls.append(Call(path, occurrence, kind, begin, begin, opened))
        if opened:
            result = call(*args, **kwargs)
        else:
            result = self._call_leaf(module, path, call, args, kwargs)
        self.calls[index] = Call(path, occurrence, kind, begin, self.position(), opened)
        return result

    def _call_leaf(
        self, module: nn.Module, path: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        with DisableTorchFunction():  # what follows is ours, not the model's
            before = self.bindings.versions((args, kwargs))
            fx_args, fx_kwargs = self.to_nodes(args), self.to_nodes(kwargs)
            real_args, real_kwargs = self.bindings.real((args, kwargs), module)
            on_meta = self.bindings.are_on_meta((real_args, real_kwargs))
            shapes = structure((real_args, real_kwargs))
            self.bindings.begin_leaf((args, kwargs))
        self.check_random()
        self.bindings.leaf_paths.append(path)
        with self.unrecorded(path), without_numbers(module) if on_meta else nullcontext():
            result = call(*real_args, **real_kwargs)
        if getattr(call, "is_direct", False):
            self._note_direct(module)
        if self.random_state() != self._last_random:
            self.random_modules.append(path)
        self.check_random(is_new=True)
        with DisableTorchFunction():
            self.bindings.end_leaf()
            if structure((real_args, real_kwargs)) != shapes:
                raise CaptureError(
                    f"{where()}: {path} changes a list or dict that it is given, which the code "
                    "around it would see and a stage would not: return the values instead"
                )
            node = self.emit("call_module", path, fx_args, fx_kwargs)
            self.bindings.note_mutations(node, before)
            self.emit("call_function", check_structure, (node, structure(result), where()), {})
            return self._bound_result(node, result, before)

    def _note_direct(self, module: nn.Module) -> None:
        """Note a call of ``layer.forward``: a stage calls the layer, and adds no frame for it."""
        number = self.names.numbers.get(id(module))
        if number is not None:
            self.route.note((number, None))

    # -- what opened code must not do, or does without a trace

    def training_node(self, module: nn.Module) -> Node:
        """Return the node that reads a module's training flag."""
        path = self.names.path_of(module)
        self.flags[self.position(), path] = None
        key = ("training", path)
        node = self._pure.get(key)
        if node is None:
            node = self._pure[key] = self.emit("get_attr", f"{path}.training".lstrip("."), (), {})
        return node

    def note_checkpoint(self) -> None:
        self.checkpoints.append(where())

    def check_random(self, *, is_new: bool = False) -> None:
        """Refuse random numbers of Python and numpy: they would be the same in every run."""
        state = self.random_state()
        if not is_new and state != self._last_random:
            raise CaptureError(
                f"{where()}: at or before this line the code draws random numbers from Python's "
                "random or numpy, which a recording would repeat: use torch.rand"
            )
        self._last_random = state


def _note_draw(func: Any) -> None:
    """Count a draw as random streams do, and note it if opened code draws."""
    if func in DRAWING and here.track is not None:
        here.track.frame.draw()
