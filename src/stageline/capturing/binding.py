"""Which value of the run is which node of the graph: tensors by identity, memory by storage."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from stageline.capturing.earlier import Earlier
from stageline.capturing.places import where
from stageline.capturing.symbols import is_symbol
from stageline.capturing.values import SIMPLE, flatten, leaves_of, map_leaves, tensors_in, unflatten
from stageline.errors import CaptureError
from stageline.torch_private import DisableTorchFunction, storage_of
from stageline.wording import a

if TYPE_CHECKING:
    from stageline.capturing.recorder import Recorder

Versions = dict[int, tuple[Tensor, int]]
_CACHES = "transformers.cache_utils"
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme)


class OpenInstead(CaptureError):
    """Opened code uses a tensor from inside a module that was not opened: it must be."""

    def __init__(self, path: str, place: str) -> None:
        self.path = path
        super().__init__(
            f"{place}: the code uses a tensor that was made inside {path} and not returned by it "
            "(a hook, or an attribute): return it from there"
        )


def fresh(pristine: Any) -> Any:
    """Return an empty cache; a node where opened code makes one, so that each stage has its own."""
    return copy.deepcopy(pristine)


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of the transformers library."""
    return any(kind.__module__ == _CACHES for kind in type(value).__mro__)


def rebuild(spec: Any, *leaves: Any) -> Any:
    """Make a tree again of its leaves; a node where a graph passes a tree of a class of its own."""
    return unflatten(list(leaves), spec)


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Bindings:
    """Knows every value of a recording.

    Attributes:
        nodes: All nodes but the inputs, in order.
        constants: Values that existed before the run, by the name of their node.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.nodes: list[Node] = []
        self.constants: dict[str, Any] = {}
        self.device: torch.device | None = None  # the real one, where parameters are on meta
        self._bound: dict[int, tuple[Any, Node]] = {}  # holds the value: ids are used again
        self._attributes: dict[int, tuple[Any, Node]] = {}
        self._mutators: dict[int, list[Node]] = {}
        self._born: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._leaf: tuple[int, frozenset[int]] = (0, frozenset())
        self._num_leaves = 0
        self.leaf_paths: list[str] = []
        self._earlier = Earlier()

    # -- tensors to nodes

    def bind_input(self, tensor: Tensor, node: Node) -> None:
        self._bound.setdefault(id(tensor), (tensor, node))
        self._describe(node, tensor)

    def bind(self, tensor: Tensor, node: Node, before: Versions) -> Tensor:
        """Say that a node made a tensor; return what the code goes on with.

        A tensor that has a node already and did not change was only handed through (dropout in
        eval, ``.to()``): the code gets an alias, or both nodes would be one.
        """
        known = self._bound.get(id(tensor))
        is_known = known is not None or id(tensor) in self._attributes
        is_known = is_known or bool(self._recorder.names.tensor_names(tensor))
        if is_known:
            changed = id(tensor) in before and before[id(tensor)][1] != version_of(tensor)
            if not changed:
                with DisableTorchFunction(), self._recorder.unrecorded("alias"):
                    tensor = tensor.view_as(tensor)
        self._bound[id(tensor)] = (tensor, node)
        self._describe(node, tensor)
        return tensor

    def bind_opaque(self, value: Any, node: Node) -> None:
        """Say that a node made something that nobody can look into."""
        node.meta["opaque"] = type(value).__name__
        self._bound[id(value)] = (value, node)

    def _describe(self, node: Node, tensor: Tensor) -> None:
        with DisableTorchFunction():
            kind = str(tensor.dtype).removeprefix("torch.")
            node.meta["text"] = f"{kind} {list(tensor.shape)}"
            node.meta["shape"] = tuple(tensor.shape)
            node.meta["bytes"] = tensor.numel() * tensor.element_size()
            node.meta["storage"] = storage_of(tensor)
            node.meta["requires_grad"] = tensor.requires_grad

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node of a tensor: of this run, a parameter, or a constant."""
        known = self._bound.get(id(tensor)) or self._attributes.get(id(tensor))
        if known is not None:
            return known[1]
        names = self._recorder.names.tensor_names(tensor)
        if names:
            return self._attribute(tensor, names[0])
        if not self._earlier.holds(tensor):
            born = self._born.get(id(tensor))
            if born is not None and born[0]() is tensor and self.leaf_paths[born[1] - 1]:
                raise OpenInstead(self.leaf_paths[born[1] - 1], where())
            raise CaptureError(
                f"{where()}: a tensor is used whose making was not seen (torch.Tensor(...), "
                "from_numpy, a script function, or a result kept from inside a module): make it "
                "with torch.tensor(...) or in a module of its own that is not cut"
            )
        return self._attribute(tensor, self._constant(tensor))

    def _constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def _attribute(self, value: Any, name: str) -> Node:
        node = self._recorder.graph.create_node("get_attr", name)
        node.meta.update(where=where(), regions=None, reading=None)
        self.nodes.append(node)
        self._attributes[id(value)] = (value, node)
        if isinstance(value, Tensor):
            self._describe(node, value)
        return node

    def varies(self, tensor: Tensor) -> bool:
        """Whether a tensor is made by this run: its sizes may differ in the next."""
        return id(tensor) in self._bound or not self.is_static(tensor)

    def is_static(self, tensor: Tensor) -> bool:
        """Whether a tensor was there before: a parameter, a buffer, a constant."""
        if id(tensor) in self._bound:
            return False
        return bool(self._recorder.names.tensor_names(tensor)) or self._earlier.holds(tensor)

    def is_new(self, value: Any) -> bool:
        """Whether something was made during this run."""
        is_part = isinstance(value, nn.Module) and self._recorder.names.registers(value)
        return not is_part and not self._earlier.holds(value)

    def is_input(self, tensor: Tensor) -> bool:
        known = self._bound.get(id(tensor))
        return known is not None and known[1].op == "placeholder"

    # -- arguments

    def to_nodes(self, value: Any) -> Any:
        """Return an argument as the graph states it."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if is_symbol(value):
            return value.fx_node
        if type(value) in SIMPLE or isinstance(value, _TORCH_CONSTANTS):
            return value
        kind = type(value)
        if kind is list:
            return [self.to_nodes(part) for part in value]
        if kind in (tuple, torch.Size):
            return tuple(self.to_nodes(part) for part in value)
        if kind is dict and all(type(key) is str for key in value):
            return {key: self.to_nodes(part) for key, part in value.items()}
        if kind is slice:
            return slice(*(self.to_nodes(part) for part in (value.start, value.stop, value.step)))
        return self._object(value)

    def _object(self, value: Any) -> Any:
        known = self._bound.get(id(value)) or self._attributes.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, np.generic):  # a number of numpy: np.sqrt(width)
            return value.item()
        if isinstance(value, nn.Module):
            return self._attribute(value, self._recorder.names.path_of(value))
        leaves, spec = flatten(value)
        if not (len(leaves) == 1 and leaves[0] is value):
            nodes = [self.to_nodes(leaf) for leaf in leaves]
            constant = self._attribute(spec, self._constant(spec))
            return self._recorder.emit("call_function", rebuild, (constant, *nodes), {})
        if self._earlier.holds(value) or self._is_plain_function(value):
            return self._attribute(value, self._constant(value))
        if is_cache(value):
            constant = self._attribute(value, self._constant(copy.deepcopy(value)))
            node = self._recorder.emit("call_function", fresh, (constant,), {})
            self._bound[id(value)] = (value, node)
            return node
        kind = type(value).__name__
        hint = "pass use_cache=False, or " if "Cache" in kind else ""
        raise CaptureError(
            f"{where()}: {a(kind)} made in opened code is handed on, and what is done to it there "
            f"could not be seen from another stage: {hint}hand on tensors in tuples or dicts"
        )

    def _is_plain_function(self, value: Any) -> bool:
        """Whether a value is a function, and hides no value of this run."""
        if isinstance(value, (type, types.BuiltinFunctionType)):
            return True
        if not isinstance(value, (types.FunctionType, types.MethodType)):
            return False
        function: Any = getattr(value, "__func__", value)
        hidden = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        hidden += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if isinstance(value, types.MethodType):
            hidden.append(value.__self__)
        for part in hidden:
            for leaf in flatten(part)[0]:
                if is_symbol(leaf) or id(leaf) in self._bound:
                    raise CaptureError(
                        f"{where()}: {function.__qualname__} is handed on and uses a value of this "
                        "run from outside: pass it as an argument"
                    )
        return True

    def real(self, value: Any, module: nn.Module | None = None) -> Any:
        """Return arguments as torch takes them: plain numbers, and all on meta if one is."""

        def plain(leaf: Any) -> Any:
            return leaf.value if is_symbol(leaf) else leaf

        value = _map_arguments(plain, value)
        if self.device is None:
            return value
        on_meta = any(tensor.is_meta for tensor in tensors_in(value))
        if module is not None:
            on_meta = on_meta or any(p.is_meta for p in (*module.parameters(), *module.buffers()))
        if not on_meta:
            return value
        return _map_arguments(self._on_meta, value)

    def _on_meta(self, leaf: Any) -> Any:
        if _is_real(leaf):
            return leaf.to("meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    def are_on_meta(self, arguments: Any) -> bool:
        """Whether the arguments of a module are on meta, where only a part of the model is."""
        return self.device is not None and any(t.is_meta for t in tensors_in(arguments))

    def real_device(self, device: Any) -> Any:
        if self.device is not None and isinstance(device, torch.device) and device.type == "meta":
            return self.device
        return device

    def forget(self) -> None:
        """Let go of all values of the run: the graph needs none of them."""
        self._earlier.forget()
        self._bound, self._attributes, self._born = {}, {}, {}

    # -- changes in place

    def versions(self, value: Any) -> Versions:
        return {id(tensor): (tensor, version_of(tensor)) for tensor in tensors_in(value)}

    def note_order(self, node: Node) -> None:
        """Note which changes in place a node comes after, in the memory that it reads."""
        before: list[Node] = []
        for used in node.all_input_nodes:
            before += self._mutators.get(used.meta.get("storage", 0), ())
        node.meta["after"] = tuple(dict.fromkeys(before))

    def note_mutations(self, node: Node, before: Versions) -> None:
        """Note which memory a node has changed."""
        for tensor, version in before.values():
            if version_of(tensor) == version:
                continue
            with DisableTorchFunction():
                storage = storage_of(tensor)
            name = self._recorder.names.parameter_in(storage)
            if name is not None:
                raise CaptureError(
                    f"{where()}: the parameter {name} is changed in place in opened code: move "
                    "this into a module of its own that is not cut"
                )
            node.meta.setdefault("mutates", []).append(storage)
            self._mutators.setdefault(storage, []).append(node)

    # -- what unopened modules do

    def begin_leaf(self, arguments: Any) -> None:
        self._num_leaves += 1
        ids = frozenset(id(tensor) for tensor in tensors_in(arguments))
        self._leaf = (self._num_leaves, ids)

    def end_leaf(self) -> None:
        self._leaf = (0, frozenset())

    def watched(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a torch function inside an unopened module; refuse values it was not given."""
        number, given = self._leaf
        if not number:
            return func(*args, **kwargs)
        if any(map(is_symbol, leaves_of((args, kwargs)))):
            self._recorder.refuse_hidden_number()
        for tensor in tensors_in((args, kwargs)):
            key = id(tensor)
            if key in given:
                continue
            bound, born = self._bound.get(key), self._born.get(key)
            is_foreign = bound is not None and bound[0] is tensor
            is_foreign |= born is not None and born[1] != number and born[0]() is tensor
            if is_foreign and not self._earlier.holds(tensor):
                raise CaptureError(
                    f"{where()}: a module that is not opened uses a tensor of this run that it "
                    "was not given as an argument, so another stage could not send it: pass it"
                )
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if id(tensor) not in given:
                self._born[id(tensor)] = (weakref.ref(tensor), number)
        return result


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_meta


def _map_arguments(function: Callable[[Any], Any], value: Any) -> Any:
    """Like map_leaves, but slices and sizes are looked into as well."""

    def deep(leaf: Any) -> Any:
        if type(leaf) is slice:
            return slice(*(function(part) for part in (leaf.start, leaf.stop, leaf.step)))
        if type(leaf) is torch.Size:
            return torch.Size([function(part) for part in leaf])
        return function(leaf)

    return map_leaves(deep, value)
