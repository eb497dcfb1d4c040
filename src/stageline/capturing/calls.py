"""How torch functions are spelled in a graph, and those that need an answer of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stageline.capturing.places import where
from stageline.errors import CaptureError
from stageline.torch_private import set_grad_enabled

if TYPE_CHECKING:
    from stageline.capturing.recorder import Recorder

_OPERATORS = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}


def size(tensor: Tensor, dim: int) -> int:
    """Return one size of a tensor; a function of its own, so that a graph reads ``size(x, 0)``."""
    return tensor.shape[dim]


def length(parts: Any) -> int:
    """Return how many parts there are; the builtin is not itself while a model is recorded."""
    return len(parts)


def rank(tensor: Tensor) -> int:
    """Return the number of dimensions of a tensor."""
    return tensor.dim()


def tolist(tensor: Tensor) -> Any:
    return tensor.tolist()


def name_of(func: Any) -> str:
    """Return the name of a torch function, for people."""
    if _is_getter(func):
        return str(func.__self__.__name__)
    return str(getattr(func, "__name__", func))


def _is_getter(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__" and hasattr(func, "__self__")


def _is_setter(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__set__", "__delete__") and hasattr(func, "__self__")


def spelled(func: Any, args: Any) -> tuple[str, Any, Any]:
    """Return op, target and arguments of the node for a torch function."""
    if _is_getter(func):
        return "call_function", getattr, (args[0], func.__self__.__name__)
    if _is_setter(func):
        name = getattr(func.__self__, "__name__", "an attribute")
        raise CaptureError(
            f"{where()}: the code sets .{name} of a tensor, which cannot be followed: use the "
            "method with an underscore, or move this into a module of its own that is not cut"
        )
    name = getattr(func, "__name__", "")
    if args and getattr(Tensor, name, None) is func:
        if name in _OPERATORS:
            return "call_function", _OPERATORS[name], args
        return "call_method", name, args
    return "call_function", _callable(func), args


@lru_cache(maxsize=4096)
def _callable(func: Any) -> Any:
    """Return a function that the code of a graph can name; some of torch's cannot be found."""
    path = f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', '')}"
    found: Any = torch
    parts = path.split(".")
    if parts[0] == "torch":
        for part in parts[1:]:
            found = getattr(found, part, None)
        if found is func:
            return func
    name = getattr(func, "__name__", "function")
    if getattr(torch, name, None) is func:
        return func
    return named(func, name)


def named(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function under a name that a graph can print."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    call.__name__ = call.__qualname__ = name.replace(".", "_").replace("<", "").replace(">", "")
    call.__module__ = __name__
    return call


# -- functions with an answer of their own

Answer = Callable[["Recorder", Any, Any, dict[str, Any]], Any]


def _shape(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not recorder.bindings.varies(tensor):
        return func(*args, **kwargs)
    _rank(recorder, func, args, kwargs)
    sizes: list[Any] = [recorder.size_of(tensor, dim) for dim in range(tensor.dim())]
    return torch.Size(sizes)


def _size(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not recorder.bindings.varies(tensor):
        return func(*args, **kwargs)
    if dim is None:
        return _shape(recorder, Tensor.size, (tensor,), {})
    real = func(tensor, int(dim))
    assert isinstance(real, int)
    return recorder.size_of(tensor, int(dim) % tensor.dim())


def _fact(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Answer with the plain value, and guard it: Python itself insists on a plain one."""
    tensor = args[0]
    if isinstance(tensor, Tensor) and recorder.bindings.is_static(tensor):
        return func(*args, **kwargs)
    value = func(*args, **kwargs)
    op, target, fx_args = spelled(func, recorder.to_nodes(args))
    recorder.guard(recorder.emit(op, target, fx_args, recorder.to_nodes(kwargs)), value)
    return value


def _rank(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return the number of dimensions; that of an input is part of what chooses a recording."""
    tensor: Tensor = args[0]
    if recorder.bindings.varies(tensor) and not recorder.bindings.is_input(tensor):
        node = recorder.pure(rank, recorder.bindings.node_of(tensor))
        node.meta["number"] = True
        recorder.guard(node, tensor.dim())
    return tensor.dim()


def _grad_fn(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    recorder.asks_for_grad = True
    return func(*args, **kwargs)


def _tolist(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    value = args[0].tolist()
    if not recorder.bindings.is_static(args[0]):
        node = recorder.emit("call_function", tolist, recorder.to_nodes(args), {})
        recorder.guard(node, value)
    return value


def _dtype(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not recorder.bindings.varies(args[0]) or recorder.bindings.is_input(args[0]):
        return func(*args, **kwargs)  # those of inputs are part of what chooses a recording
    value = func(*args, **kwargs)
    node = recorder.pure(getattr, recorder.bindings.node_of(args[0]), "dtype")
    node.meta["number"] = True
    recorder.guard(node, value)
    return value


def _device(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return recorder.bindings.real_device(func(*args, **kwargs))


def _requires_grad(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if recorder.bindings.is_static(args[0]) or recorder.bindings.is_input(args[0]):
        return func(*args, **kwargs)
    recorder.asks_for_grad = True
    return recorder.call_function(func, args, kwargs)


def _silent(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _refused(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise CaptureError(
        f"{where()}: the code calls {name_of(func)} on a tensor, which a recording cannot keep: "
        "move this into a module of its own that is not cut"
    )


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _answers() -> dict[Any, Answer]:
    table: dict[Any, Answer] = {
        _getter("shape"): _shape,
        Tensor.size: _size,
        Tensor.dim: _rank,
        Tensor.ndimension: _rank,
        _getter("ndim"): _rank,
        Tensor.tolist: _tolist,
        _getter("dtype"): _dtype,
        _getter("device"): _device,
        _getter("requires_grad"): _requires_grad,
        set_grad_enabled: _silent,
        _getter("grad_fn"): _grad_fn,
        Tensor.__repr__: _refused,
        Tensor.__format__: _refused,
        Tensor.backward: _refused,
        Tensor.register_hook: _refused,
    }
    for name in ("__int__", "__float__", "__index__", "__complex__", "__len__"):
        table[getattr(Tensor, name)] = _fact
    for func in (torch.manual_seed, torch.seed, torch.set_rng_state):
        table[func] = _refused
    return table


SPECIAL = _answers()
