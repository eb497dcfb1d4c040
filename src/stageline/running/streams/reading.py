"""Can this code draw random numbers? Its instructions are read, nothing is run.

    def forward(self, x):                     self.conv    a module, which is asked for itself
        return F.relu(self.conv(x) + x)       F.relu       of torch, and not one that draws

Every name must lead to something that is known: parts of the module, torch's own functions, other
code that can be read. Whatever else is in it, the answer is that it may draw. Should the answer be
wrong all the same, because a name was bound anew or an input is no tensor, the escape check after
the step finds the default generator moved.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Callable, Mapping
from inspect import getattr_static
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stageline.capturing.direct.calls import is_called_plainly
from stageline.capturing.streams.functions import DRAWING

_PLACES = (torch, nn, F, math)
_PYTHON = """
    abs all any bool dict enumerate float int isinstance len list max min range reversed set slice
    sorted str sum tuple zip NotImplementedError RuntimeError TypeError ValueError
"""
_BUILTINS = (Tensor, *(getattr(builtins, name) for name in _PYTHON.split()))
_OF_PYTHON = (bool, int, float, complex, str, type(None))
_OF_TORCH = (Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format)
_WRITTEN_IN_PYTHON = ("torch.functional", "torch.nn.functional")

# They run code that is handed to them.
_HOOKS = """
    apply_ map_ map2_ backward register_hook register_post_accumulate_grad_hook
"""
_OF_TENSORS = frozenset(dir(Tensor)) - {each.__name__ for each in DRAWING} - {*_HOOKS.split()}
_OF_CONTAINERS = frozenset(("append", "extend", "items", "keys", "values"))

_FORBIDDEN = frozenset(
    ("IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_SUPER_ATTR", "STORE_GLOBAL")
)
_ON_ATTRIBUTES = frozenset(("DELETE_ATTR", "LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"))
_PASSED_OVER = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "RESUME"))
_DEEPEST = 20


class _MayDraw(Exception):
    """Something is in the code of which nothing is known."""


class _Opaque:
    """A value that only a run would tell: a tensor, or made of what was looked at."""


_OPAQUE = _Opaque()


def forward_draws_nothing(module: nn.Module) -> bool:
    """Whether the forward of a module certainly draws nothing; its children answer for themselves.

    Example:
        >>> class Block(nn.Module):
        ...     def forward(self, x):
        ...         return x.relu() + 1
        >>> class Noisy(nn.Module):
        ...     def forward(self, x):
        ...         return x + torch.randn_like(x)
        >>> forward_draws_nothing(Block()), forward_draws_nothing(Noisy())
        (True, False)
    """
    if not is_called_plainly(module):
        return False
    return _is_quiet(getattr_static(type(module), "forward"), module)


def function_draws_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function certainly draws nothing.

    Example:
        >>> function_draws_nothing(lambda output, target: F.mse_loss(output, target))
        True
    """
    return _is_quiet(function, None)


def _is_quiet(function: object, owner: nn.Module | None) -> bool:
    try:
        _read(function, owner, depth=0)
    except _MayDraw:
        return False
    return True


def _read(function: object, owner: nn.Module | None, depth: int) -> None:
    if type(function) is not FunctionType or depth > _DEEPEST:
        raise _MayDraw
    cells = function.__closure__ or ()
    free = dict(zip(function.__code__.co_freevars, cells, strict=True))
    _Reader(function, free, owner, depth).read(function.__code__)


class _Reader:
    """Follows what the instructions of a function load, one after the other.

    Args:
        function: Whose instructions they are.
        free: What it has from the functions around it.
        owner: Its first argument, if that is a module.
        depth: How many functions lie between it and the first one.
    """

    def __init__(
        self, function: FunctionType, free: Mapping[str, Any], owner: nn.Module | None, depth: int
    ) -> None:
        code = function.__code__
        self._names = function.__globals__
        self._free = free
        self._owner = owner
        self._itself = code.co_varnames[0] if owner is not None and code.co_argcount else None
        self._depth = depth

    def read(self, code: CodeType, *, is_inside: bool = False) -> None:
        """Look at all instructions.

        Args:
            code: What they are.
            is_inside: Whether they are those of a function in the function.
        """
        itself = None if is_inside else self._itself
        top: Any = _OPAQUE
        for each in dis.get_instructions(code):
            if each.opname in _PASSED_OVER:
                continue
            handed_on = top is self._owner is not None and each.opname not in _ON_ATTRIBUTES
            if handed_on or each.opname in _FORBIDDEN or _hides(each, itself):
                raise _MayDraw
            top = self._loaded(each, top, self._owner if _loads(each, itself) else _OPAQUE)

    def _loaded(self, each: dis.Instruction, top: Any, local: Any) -> Any:
        """Return what lies on the stack after an instruction, as far as that is known."""
        if each.opname == "LOAD_GLOBAL":
            return self._known(self._global(each.argval))
        if each.opname == "LOAD_DEREF":
            return self._of_closure(each.argval)
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return self._attribute(top, each.argval)
        if isinstance(each.argval, CodeType):
            self.read(each.argval, is_inside=True)
        return local

    def _global(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        return getattr(builtins, name, _MayDraw)

    def _of_closure(self, name: str) -> Any:
        if name == self._itself:
            return self._owner
        if name not in self._free:
            return _OPAQUE  # of its own, for a function inside
        try:
            return self._known(self._free[name].cell_contents)
        except ValueError:  # not bound yet
            raise _MayDraw from None

    def _known(self, value: Any) -> Any:
        """Return a value that a name leads to, if its use draws nothing."""
        if value is _OPAQUE or any(value is place for place in _PLACES):
            return value
        if type(value) is FunctionType and value.__module__ not in _WRITTEN_IN_PYTHON:
            _read(value, None, self._depth + 1)
            return _OPAQUE
        if _is_plain(value) or _is_quiet_function(value):
            return value
        raise _MayDraw

    def _attribute(self, top: Any, name: str) -> Any:
        if isinstance(top, nn.Module):
            return self._of_module(top, name)
        if isinstance(top, ModuleType):
            return self._known(getattr(top, name, _MayDraw))
        if name not in _OF_TENSORS and name not in _OF_CONTAINERS:
            raise _MayDraw
        return _OPAQUE

    def _of_module(self, module: nn.Module, name: str) -> Any:
        if not is_called_plainly(module):
            raise _MayDraw
        if name in module._modules:
            return module._modules[name]
        if name in module._parameters or name in module._buffers:
            return _OPAQUE
        if name in vars(module):
            return self._known(vars(module)[name])
        found = getattr_static(type(module), name, _MayDraw)
        if type(found) is FunctionType:
            _read(found, module, self._depth + 1)
            return _OPAQUE
        if isinstance(found, staticmethod):
            found = found.__func__
        return self._known(found)


def _loads(each: dis.Instruction, name: str | None) -> bool:
    """Whether an instruction ends with this local variable on top of the stack."""
    if name is None or "LOAD_FAST" not in each.opname:
        return False
    return bool(each.argval == name or (type(each.argval) is tuple and each.argval[-1] == name))


def _hides(each: dis.Instruction, name: str | None) -> bool:
    """Whether an instruction binds this local variable anew, or puts another one on top of it."""
    if name is None or "_FAST" not in each.opname:
        return False
    touched = each.argval if type(each.argval) is tuple else (each.argval,)
    return name in (touched[:-1] if "LOAD_FAST" in each.opname else touched)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is data: a module in a list, for one, is not looked at by anybody."""
    if isinstance(value, (list, tuple)) and depth < 3:
        return all(_is_plain(each, depth + 1) for each in value)
    if type(value) is dict and depth < 3:
        return all(_is_plain(each, depth + 1) for each in value.values())
    return isinstance(value, (*_OF_PYTHON, *_OF_TORCH))


def _is_quiet_function(value: Any) -> bool:
    """Whether a value is a function of torch or Python that draws nothing, under its own name."""
    if any(value is each for each in _BUILTINS):  # by identity: not everything can be compared
        return True
    is_simple = isinstance(value, BuiltinFunctionType) or (
        isinstance(value, FunctionType) and value.__module__ in _WRITTEN_IN_PYTHON
    )
    return (
        is_simple
        and value not in DRAWING
        and any(getattr(place, value.__name__, None) is value for place in _PLACES)
    )
