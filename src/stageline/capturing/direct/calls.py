"""A module called directly, for as long as nothing about it changes.

``STAGELINE_DIRECT_CALLS=0 python train.py`` calls all modules as torch does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from inspect import getattr_static
from itertools import chain, repeat
from operator import is_, itemgetter
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from stageline.capturing.direct.entrances import Entrance, Way
from stageline.capturing.direct.layers import (
    LAYERS,
    are_as_known,
    entering,
    is_as_known,
    methods_of,
    sequential,
)
from stageline.capturing.direct.operations import TORCH, Call, Operations
from stageline.capturing.direct.rewriting import Layer, Path, read
from stageline.capturing.stage import StageModule
from stageline.torch_private import CALL, COMPILED_CALL, MODULE_HOOKS, hooks_of, is_bare

__all__ = ["VARIABLE", "Call", "DirectCall", "is_called_plainly", "listening"]

VARIABLE = "STAGELINE_DIRECT_CALLS"

# What a function has taken out of its layer once; torch only changes what is in there.
_tables = itemgetter("_parameters", "_buffers", "_modules", *MODULE_HOOKS)
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_TAKE_ONE = frozenset((*LAYERS, nn.Sequential))


class DirectCall:
    """What to call instead of a module.

    Example:
        >>> import torch
        >>> direct = DirectCall(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)))
        >>> direct.now()(torch.ones(1, 2, 2)).shape
        torch.Size([1, 4])

    Attributes:
        entrance: The layer that meets all of the input, where that is known of what was made last.
        is_known: Whether all is known of what was made last, down to the layers.

    Args:
        module: What is called.
        operations: What meets weights.
    """

    entrance: Entrance | None
    is_known: bool

    def __init__(self, module: nn.Module, operations: Operations = TORCH) -> None:
        self._module = module
        self._operations = operations
        self._is_wanted = os.environ.get(VARIABLE, "1") != "0"
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the rest would call the same layers.
        return DirectCall, (self._module, self._operations)

    def _forget(self) -> None:
        self._call: Call | None = None
        self.entrance = None
        self.is_known = False
        self._used: list[nn.Module] = []
        self._kinds: list[type[nn.Module]] = []
        self._seen: list[Any] = []

    def now(self) -> Call:
        """Return what to call; to be asked again before each batch, for modules change.

        Hooks of modules may come and go at any time: every call looks for them.
        """
        if not (self._is_wanted and are_as_known() and is_bare(self._module)):
            self._forget()
            return self._operations.whole(self._module)
        seen = _look(self._used, self._kinds)
        if self._call is None or not _are_same(seen, self._seen):
            maker = _Maker(self._operations)
            call = maker.direct(self._module, way=None if self._operations.follows else ())
            self._call = listening(self._module, call, self._operations)
            self.entrance, self.is_known = maker.entrance, maker.knows_all
            self._used, self._kinds = maker.used, list(set(map(type, maker.used)))
            self._seen = _look(self._used, self._kinds)
        return self._call


def listening(module: nn.Module, call: Call, operations: Operations = TORCH) -> Call:
    """Return what calls a module as soon as somebody listens to it, and else what is given."""
    hooks, pre_hooks, backward_hooks, backward_pre_hooks = hooks_of(module)
    takes_one, whole = type(module) in _TAKE_ONE, operations.whole(module)

    def listening(*args: Any, **kwargs: Any) -> Any:
        if hooks or pre_hooks or backward_hooks or backward_pre_hooks:
            return whole(*args, **kwargs)
        if takes_one and (kwargs or len(args) != 1):
            return whole(*args, **kwargs)  # which says what is wrong
        return call(*args, **kwargs)

    return listening


def _look(modules: Sequence[nn.Module], kinds: Iterable[type[nn.Module]]) -> list[Any]:
    """Return all that a direct call has taken out of modules, as it is now."""
    own = [vars(module) for module in modules]
    return [
        *map(type, modules),
        *map(len, own),
        *chain.from_iterable(map(methods_of, kinds)),
        *(getattr(kind.forward, name, None) for kind in kinds for name in _OF_FUNCTIONS),
        *chain.from_iterable(map(_tables, own)),
        *chain.from_iterable(each["_modules"] for each in own),
        *chain.from_iterable(each["_modules"].values() for each in own),
        *(each.get(COMPILED_CALL) for each in own),
    ]


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call and an attribute of a module are what they are for most."""
    return type(module).__call__ is nn.Module.__call__ and _has_plain_attributes(module)


def _has_plain_attributes(module: nn.Module) -> bool:
    names = ("__getattr__", "__getattribute__")
    return all(getattr(type(module), name) is getattr(nn.Module, name) for name in names)


def _is_written_by_torch(module: nn.Module) -> bool:
    """Whether what a module does was written with its class; torch.fx runs code of the user's."""
    forward = getattr_static(type(module), "forward")
    written_in = getattr(forward, "__globals__", {}).get("__name__", "")
    return str(written_in).startswith("torch.nn.modules.")


def _is_without_weights(module: nn.Module) -> bool:
    """Whether a module of torch's, whatever it does, does it to its input alone."""
    held = [*module._modules.values(), *module._parameters.values(), *vars(module).values()]
    return not any(isinstance(each, (nn.Module, Tensor)) for each in held)


class _Maker:
    """Makes calls direct, and notes which modules it has used for them, and where input enters.

    Attributes:
        used: Those modules.
        entrance: Where all of the input enters, if that is known.
        knows_all: Whether there is no module of which nothing is known.
    """

    def __init__(self, operations: Operations) -> None:
        self.used: list[nn.Module] = []
        self.entrance: Entrance | None = None
        self.knows_all = True
        self._operations = operations
        self._open: set[int] = set()  # modules whose calls are being made: one may hold itself

    def direct(self, module: nn.Module, *, way: Way = None) -> Call:
        """Return what does the same as a call of a module: itself, where nothing is known of it.

        Args:
            module: What is called.
            way: Whose calls all of the input has gone into so far, if all of it goes into this one
                too, as its first argument.
        """
        own, kind = vars(module), type(module)
        if id(module) in self._open or "forward" in own or own.get(COMPILED_CALL) is not None:
            return self._whole(module)
        if isinstance(module, StageModule):
            return self._rewritten(module, module.code, way=way)
        if not is_called_plainly(module) or CALL in own:
            return self._whole(module)
        if kind in _TAKE_ONE:
            is_known = is_as_known(module)
            return self._known(module, way=way) if is_known else self._whole(module)
        if kind.__module__.startswith("torch."):
            return self._of_torch(module)
        return self._rewritten(module, way=way)

    def _of_torch(self, module: nn.Module) -> Call:
        """Return the forward of a module of torch's: what its call comes to, if nobody listens."""
        is_followed = self._operations.follows and not _is_without_weights(module)
        if is_followed or not _is_written_by_torch(module):
            return self._whole(module)
        self.used.append(module)
        forward: Call = module.forward
        return forward

    def _whole(self, module: nn.Module) -> Call:
        self.knows_all = False
        return self._operations.whole(module)

    def _known(self, module: nn.Module, *, way: Way) -> Call:
        self.used.append(module)
        if way is not None and type(module) is nn.Linear:
            self.entrance = Entrance(module, way)
            return entering(module, self.entrance)
        if type(module) is not nn.Sequential:
            return LAYERS[type(module)](module, self._operations)
        layers = [layer for layer in module._modules.values() if layer is not None]
        ways = [_through(way, module), *repeat(None, len(layers))]
        calls = [self.direct(layer, way=way) for layer, way in zip(layers, ways, strict=False)]
        return sequential(module, list(zip(layers, calls, strict=True)), self._operations)

    def _rewritten(self, module: nn.Module, source: str | None = None, *, way: Way) -> Call:
        if self._operations.follows:
            return self._whole(module)
        forward = getattr_static(type(module), "forward")
        method = read(forward, source) if type(forward) is FunctionType else None
        if method is None:
            return self._whole(module)
        self.used.append(module)
        self._open.add(id(module))
        found = {
            path: self._layer(
                module, path, way=_through(way, module) if path == method.entrance else None
            )
            for path in method.paths
        }
        self._open.remove(id(module))
        layers = {path: layer for path, layer in found.items() if layer is not None}
        try:
            return method.twin(forward, module, layers)
        except RecursionError:  # an expression too deep to be copied
            return self._whole(module)

    def _layer(self, module: nn.Module, path: Path, *, way: Way) -> Layer | None:
        """Return what a path leads to, if it leads through modules only."""
        holder, (*holders, last) = module, path
        for name in holders:
            inner = _held(holder, name)
            if inner is None:
                return None
            self.used.append(inner)
            holder = inner
        layer = _held(holder, last)
        if layer is None:
            return None
        call = self.direct(layer, way=way)
        return Layer(call, layer, holder, takes_one=type(layer) in _TAKE_ONE)


def _through(way: Way, module: nn.Module) -> Way:
    return None if way is None else (*way, module)


def _held(module: nn.Module, name: str) -> nn.Module | None:
    """Return what an attribute of a module is, if that is a module that it holds."""
    is_hidden = name in vars(module) or hasattr(type(module), name)
    if is_hidden or not _has_plain_attributes(module):
        return None
    return module._modules.get(name)
