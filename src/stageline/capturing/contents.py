"""What one object holds, noted in a way that it can be put back: the parts of a snapshot.

Every keeper holds on to its object, so the same object is there afterwards.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ABSENT = object()


class Keeper(ABC):
    """Notes the state of an object, and puts it back.

    Attributes:
        saved: What the object held: attribute, key or index, and the value.
    """

    __slots__ = ("saved", "target")

    def __init__(self, target: Any) -> None:
        self.target = target
        self.saved: dict[Any, Any] = self.now()

    def now(self) -> dict[Any, Any]:
        """Return what the object holds at present."""
        return {}

    @abstractmethod
    def restore(self) -> None:
        """Give the object what it held."""


class Holder(Keeper):
    """Keeps an object that is no more than what it holds."""

    __slots__ = ()

    @abstractmethod
    def put_back(self) -> None:
        """Give the object what it held; it holds something else."""

    def restore(self) -> None:
        now = self.now()
        if list(now) != list(self.saved) or not all(map(is_, now.values(), self.saved.values())):
            self.put_back()


class Attributes(Holder):
    """The ``__dict__`` of a module or a plain object, and its class: lazy modules change theirs."""

    __slots__ = ("kind",)

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.kind = type(target)

    def now(self) -> dict[Any, Any]:
        return dict(vars(self.target))

    def put_back(self) -> None:
        attributes = vars(self.target)
        attributes.clear()
        attributes.update(self.saved)

    def restore(self) -> None:
        if type(self.target) is not self.kind:
            self.target.__class__ = self.kind
        super().restore()


class Slots(Holder):
    """What an object without a ``__dict__`` holds."""

    __slots__ = ()

    def now(self) -> dict[Any, Any]:
        held = {name: getattr(self.target, name, _ABSENT) for name in slot_names(self.target)}
        return {name: value for name, value in held.items() if value is not _ABSENT}

    def put_back(self) -> None:
        # Not setattr: the object may be frozen, and was changed in spite of it.
        for name in self.now().keys() - self.saved.keys():
            object.__delattr__(self.target, name)
        for name, value in self.saved.items():
            object.__setattr__(self.target, name, value)


class Dict(Holder):
    """A dict of any kind; what a subclass makes of its methods is passed by."""

    __slots__ = ()

    def now(self) -> dict[Any, Any]:
        if isinstance(self.target, OrderedDict):  # it keeps an order of its own
            return dict(OrderedDict.items(self.target))
        return dict(dict.items(self.target))

    def put_back(self) -> None:
        kind = OrderedDict if isinstance(self.target, OrderedDict) else dict
        kind.clear(self.target)
        for key, value in self.saved.items():
            kind.__setitem__(self.target, key, value)


class List(Holder):
    """A list."""

    __slots__ = ()

    def now(self) -> dict[Any, Any]:
        return dict(enumerate(list.__iter__(self.target)))

    def put_back(self) -> None:
        list.__setitem__(self.target, slice(None), self.saved.values())


class Collection(Holder):
    """A set or a deque."""

    __slots__ = ()

    def now(self) -> dict[Any, Any]:
        return dict(enumerate(self.target))

    def put_back(self) -> None:
        self.target.clear()
        add = self.target.update if isinstance(self.target, set) else self.target.extend
        add(self.saved.values())


class Fixed(Keeper):
    """A tuple or a frozenset: it cannot change, but what it holds can."""

    __slots__ = ()

    def now(self) -> dict[Any, Any]:
        return dict(enumerate(self.target))

    def restore(self) -> None:
        return


class State(Keeper):
    """An object whose state is asked for and set by functions: a random generator, an array."""

    __slots__ = ("_set", "_state")

    def __init__(
        self, target: Any, get: Callable[[Any], Any], set_: Callable[[Any, Any], Any]
    ) -> None:
        super().__init__(target)
        self._state, self._set = get(target), set_

    def restore(self) -> None:
        self._set(self.target, self._state)


class TensorData(Keeper):
    """A tensor: which memory it stands for, its flags and, if asked for, the values.

    Values are compared, not version counters: a write through ``.data`` counts nothing.
    """

    __slots__ = ("_alias", "_is_leaf", "_kind", "_requires_grad", "_values")

    def __init__(self, target: Tensor, *, copied: bool) -> None:
        super().__init__(target)
        self._kind, self._is_leaf = type(target), target.grad_fn is None
        self._requires_grad = target.requires_grad
        self._alias = target.data if is_plain(target) else None
        self._values: Tensor | None = None
        if copied and self._is_leaf and self._alias is not None:
            self._values = _distinct(self._alias).clone()

    def restore(self) -> None:
        if self._alias is not None and not nn.parameter.is_lazy(self.target):
            self._restore_data(self._alias)
        if type(self.target) is not self._kind:  # a lazy parameter that has got its shape
            self.target.__class__ = self._kind
        if self._is_leaf:
            self._restore_flags()

    def _restore_data(self, alias: Tensor) -> None:
        # Through .data, whose version counter is another: graphs of the user that saved the
        # tensor stay valid.
        if not self.target.data.is_set_to(alias):
            self.target.data = alias
        if self._values is not None:
            there = _distinct(alias)
            if not torch.equal(there, self._values):
                with torch.inference_mode() if there.is_inference() else torch.no_grad():
                    there.copy_(self._values)

    def _restore_flags(self) -> None:
        if self.target.grad_fn is not None:  # an operation in place made it part of a graph
            self.target.detach_()
        if self.target.requires_grad != self._requires_grad:
            self.target.requires_grad_(self._requires_grad)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is numbers in memory, and nothing else: no meta, no wrapper, not sparse."""
    return (
        not tensor.is_meta
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def _distinct(tensor: Tensor) -> Tensor:
    """Return a tensor without the repetitions that ``expand`` made: they cannot be written to."""
    for dimension, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def slot_names(value: Any) -> list[str]:
    """Return the names of what an object holds outside a ``__dict__``."""
    names: list[str] = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _write_array(array: Any, values: Any) -> None:
    if array.dtype.hasobject or not np.array_equal(array, values):
        np.copyto(array, values)


def _set_numpy_state(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_CONTAINERS: tuple[tuple[Any, type[Keeper]], ...] = (
    (dict, Dict),
    (list, List),
    ((set, deque), Collection),
    ((tuple, frozenset), Fixed),
)

_STATES: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (np.random.Generator, lambda generator: generator.bit_generator.state, _set_numpy_state),
    (np.ndarray, np.ndarray.copy, _write_array),
)

# Other threads may be at work on these, or they belong to no model.
_LEFT_ALONE = (
    *("asyncio", "concurrent", "contextvars", "ctypes", "inspect", "io", "logging"),
    *("multiprocessing", "queue", "threading", "torch", "typing", "weakref"),
)


def keeper_of(value: Any) -> Keeper | None:
    """Return what keeps an object that is no tensor, or None if it cannot change or is not ours."""
    if isinstance(value, nn.Module):
        return Attributes(value)
    for kinds, container in _CONTAINERS:
        if isinstance(value, kinds):
            return container(value)
    for kind, get, set_ in _STATES:
        if isinstance(value, kind):
            return State(value, get, set_) if _is_ours(value) else None
    if isinstance(value, type | Enum) or _home(value) in _LEFT_ALONE:
        return None
    return _keeper_of_object(value)


def _is_ours(value: Any) -> bool:
    """Whether it may be copied: not an array that cannot be written, nor a file as an array."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and not isinstance(value, np.memmap)
    return True


def _home(value: Any) -> str:
    """Return the package that an object's class comes from."""
    return str(getattr(type(value), "__module__", "")).partition(".")[0]


def _keeper_of_object(value: Any) -> Keeper | None:
    if isinstance(getattr(value, "__dict__", None), dict):
        return Attributes(value)
    return Slots(value) if _home(value) != "builtins" and slot_names(value) else None
