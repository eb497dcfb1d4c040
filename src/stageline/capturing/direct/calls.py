"""A module called directly, for as long as nothing about it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import getattr_static
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import FunctionType
from typing import Any

from torch import nn
from torch.fx import GraphModule

from stageline.capturing.direct.layers import LAYERS, are_as_known, sequential
from stageline.capturing.direct.rewriting import Path, read
from stageline.torch_private import COMPILED_CALL, MODULE_HOOKS, is_bare

Call = Callable[..., Any]

# What a function has taken out of its layer once; torch only changes what is in there.
_tables = itemgetter("_parameters", "_buffers", "_modules", *MODULE_HOOKS)
_forward = attrgetter("forward")


class DirectCall:
    """What to call instead of a module.

    Example:
        >>> import torch
        >>> direct = DirectCall(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)))
        >>> direct.now()(torch.ones(1, 2, 2)).shape
        torch.Size([1, 4])
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._call: Call = module
        self._used: list[nn.Module] | None = None
        self._seen: list[Any] = []

    def now(self) -> Call:
        """Return what to call; to be asked again before each batch, for modules change.

        Hooks of modules may come and go at any time: every call looks for them.
        """
        if not are_as_known() or not is_bare(self._module):
            return self._module
        if self._used is None or not _are_same(self._seen, _look(self._used)):
            maker = _Maker()
            self._call = maker.direct(self._module)
            self._used = maker.used
            self._seen = _look(self._used)
        return self._call


def _look(modules: Sequence[nn.Module]) -> list[Any]:
    """Return all that a direct call has taken out of modules, as it is now."""
    own = [vars(module) for module in modules]
    return [
        *map(type, modules),
        *map(_forward, map(type, modules)),
        *chain.from_iterable(map(_tables, own)),
        *chain.from_iterable(each["_modules"].values() for each in own),
        *(each.get("forward") for each in own),
        *(each.get(COMPILED_CALL) for each in own),
    ]


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call and an attribute of a module are what they are for most."""
    names = ("__call__", "__getattr__", "__getattribute__")
    return all(getattr(type(module), name) is getattr(nn.Module, name) for name in names)


class _Maker:
    """Makes calls direct, and notes which modules it has used for them."""

    def __init__(self) -> None:
        self.used: list[nn.Module] = []

    def direct(self, module: nn.Module) -> Call:
        """Return what does the same as a call of a module: itself, where nothing is known of it."""
        own, kind = vars(module), type(module)
        if isinstance(module, GraphModule):
            return self._rewritten(module, module.code)
        if not is_called_plainly(module) or "forward" in own or own.get(COMPILED_CALL) is not None:
            return module
        if kind in LAYERS:
            self.used.append(module)
            return LAYERS[kind](module)
        if type(module) is nn.Sequential:
            self.used.append(module)
            return sequential(module, [self.direct(child) for child in module])
        return module if kind.__module__.startswith("torch.") else self._rewritten(module)

    def _rewritten(self, module: nn.Module, source: str | None = None) -> Call:
        forward = getattr_static(type(module), "forward")
        method = read(forward, source) if type(forward) is FunctionType else None
        if method is None:
            return module
        self.used.append(module)
        children = {path: self._child(module, path) for path in method.paths}
        calls = {path: self.direct(child) for path, child in children.items() if child is not None}
        return method.twin(forward, module, calls)

    def _child(self, module: nn.Module, path: Path) -> nn.Module | None:
        """Return the module that a path leads to, if it leads through modules only."""
        holder, (*holders, last) = module, path
        for name in holders:
            inner = _held(holder, name)
            if inner is None:
                return None
            self.used.append(inner)
            holder = inner
        return _held(holder, last)


def _held(module: nn.Module, name: str) -> nn.Module | None:
    """Return what an attribute of a module is, if that is a module that it holds."""
    is_hidden = name in vars(module) or hasattr(type(module), name)
    if is_hidden or type(module).__getattr__ is not nn.Module.__getattr__:
        return None
    return module._modules.get(name)
