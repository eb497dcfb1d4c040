"""Marks in the model's own code: where a cut may lie.

    x = self.cut(x)                     CutPoint, a module that returns its input
    with sl.Block("B1"): ...            Block, a scope; also @sl.Block("B1") on a function
    sl.begin_block(model.fc, "B2")      from this module's call on, until the next begun block

A mark that nobody listens to does nothing: the model runs as if it were not there. A recording
listens in its own thread and writes down which position each mark was reached at.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Protocol, TypeVar

from torch import nn

from stageline.capturing.graph import Mark
from stageline.capturing.naming import named_everywhere
from stageline.capturing.places import where
from stageline.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Module = TypeVar("_Module", bound=nn.Module)


class Listener(Protocol):
    """Who wants to know which marks are reached; ``where`` is the user's file and line."""

    def reached(self, point: CutPoint, where: str) -> None:
        """Note that a CutPoint was called."""

    def entered(self, name: str, where: str) -> None:
        """Note that a Block scope began."""

    def left(self, name: str) -> None:
        """Note that the Block scope that was entered last has ended."""

    def begun(self, name: str, module: nn.Module, where: str) -> None:
        """Note that a module was called at which a block begins."""


class _State(threading.local):
    listener: Listener | None = None


_state = _State()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of every mark that this thread reaches."""
    before, _state.listener = _state.listener, listener
    try:
        yield
    finally:
        _state.listener = before


class CutPoint(nn.Module):
    """A place where the model may be cut: returns what it is given.

    Each CutPoint is called once in a run of the model; a place of its own needs one of its own.
    They may stand in a ModuleList, a Sequential or a plain list.

    Example:
        >>> cut = CutPoint()
        >>> cut(("anything", None))
        ('anything', None)
    """

    def forward(self, x: Any) -> Any:
        listener = _state.listener
        if listener is not None:
            listener.reached(self, where())
        return x


class Block:
    """A named part of the model: a scope in ``forward``, or a decorator of a function.

    The same name may be entered again; it is then one block. Blocks cannot be nested.

    Example:
        >>> @Block("B1")
        ... def double(x):
        ...     return 2 * x
        >>> with Block("B2"):
        ...     three = 3
        >>> double(three)
        6
    """

    def __init__(self, name: str) -> None:
        _check_name("sl.Block", name)
        self.name = name

    def __enter__(self) -> None:
        listener = _state.listener
        if listener is not None:
            listener.entered(self.name, where())

    def __exit__(self, *failure: object) -> None:
        listener = _state.listener
        if listener is not None:
            listener.left(self.name)

    def __call__(self, function: _Function) -> _Function:
        """Return the function with all that it does in this block."""
        self._check_function(function)
        name = self.name

        @wraps(function)
        def in_block(*args: Any, **kwargs: Any) -> Any:
            # Not `with self`: torch.compile knows only scopes that are made where they are used.
            with Block(name):
                return function(*args, **kwargs)

        return in_block  # type: ignore[return-value]  # the same signature, by wraps

    def __repr__(self) -> str:
        return f"Block({self.name!r})"

    def _check_function(self, function: object) -> None:
        if isinstance(function, nn.Module):
            kind, way_out = type(function).__name__, f"sl.begin_block(module, {self.name!r})"
        elif isinstance(function, type):
            kind, way_out = f"the class {function.__name__}", "decorate its forward"
        elif not callable(function):
            kind, way_out = type(function).__name__, "decorate a function"
        elif inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            # Its body runs after the call has returned, when the block has ended.
            kind, way_out = "a generator or coroutine", f"use `with sl.Block({self.name!r}):` in it"
        else:
            return
        raise ConfigError(repr(self), [f"wanted a function, got {kind}: {way_out}"])


class _BlockBegins:
    """The hook of a module at which a block begins; a class, so that it can be pickled."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        listener = _state.listener
        if listener is not None:
            listener.begun(self.name, module, where())


def begin_block(module: _Module, name: str) -> _Module:
    """Let a block begin at a module's call; it lasts until the next begun block, or to the end.

    The module is changed in place, by a hook, and returned. Names of parameters, copies and
    pickles stay what they were; ``remove_blocks`` takes the hook away again.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> begin_block(model[1], "B2")
        ReLU()
        >>> remove_blocks(model)
        1
    """
    what = f"sl.begin_block(..., {name!r})"
    _check_name("sl.begin_block", name)
    if not isinstance(module, nn.Module):
        raise ConfigError(what, [f"wanted a module, got {type(module).__name__}"])
    before = begun_block(module)
    if before is not None:
        kind = type(module).__name__
        finding = f"block {before!r} begins at this {kind} already: call sl.remove_blocks first"
        raise ConfigError(what, [finding])
    # First in line, so that what the user's own hooks do belongs to the block as well.
    module.register_forward_pre_hook(_BlockBegins(name), prepend=True)
    return module


def remove_blocks(model: nn.Module) -> int:
    """Undo every ``begin_block`` in a model; return how many there were."""
    count = 0
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if is_own_hook(hook)]:
            del hooks[key]
            count += 1
    return count


def begun_block(module: nn.Module) -> str | None:
    """Return the name of the block that begins at a module's call, if any."""
    hooks = module._forward_pre_hooks.values()
    return next((hook.name for hook in hooks if isinstance(hook, _BlockBegins)), None)


def is_own_hook(hook: object) -> bool:
    """Whether a hook is one of ``begin_block``, which changes nothing."""
    return isinstance(hook, _BlockBegins)


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(what, [f"wanted the name of a block, got {name!r}"])


class MarkLog:
    """Writes down which marks a recording reaches, and at which position.

    Blocks are written down when they end, so ``marks`` and ``findings`` are complete only after
    ``finish``.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2), CutPoint(), nn.Linear(2, 2))
        >>> log = MarkLog(model, position=lambda: 1)
        >>> with listening(log):
        ...     _ = model(torch.zeros(1, 2))
        >>> log.finish(2)
        >>> [(mark.kind, mark.name, mark.begin) for mark in log.marks], log.findings
        ([('cut', '1', 1)], [])
    """

    def __init__(self, model: nn.Module, *, position: Callable[[], int]) -> None:
        self.findings: list[str] = []
        self._position = position
        modules = named_everywhere(model)
        self._points = {
            id(module): (name, module)
            for name, module in modules.items()
            if isinstance(module, CutPoint)
        }
        self._begins = {
            id(module): (name, block)
            for name, module in modules.items()
            if (block := begun_block(module)) is not None
        }
        self._marks: list[Mark] = []
        # The CutPoint is kept alive, so that no other one can take over its id.
        self._reached: dict[int, tuple[str, CutPoint]] = {}
        self._called: set[int] = set()  # ids of the modules at which a block begins
        self._open: list[Mark] = []  # scopes, outermost first; more than one is a finding
        self._begun: Mark | None = None

    @property
    def marks(self) -> list[Mark]:
        """What was reached, in forward order."""
        return sorted(self._marks, key=lambda mark: (mark.begin, mark.end))

    def reached(self, point: CutPoint, where: str) -> None:
        name = self._points.get(id(point), (f"at {where}", point))[0]
        if id(point) in self._reached:
            before, _ = self._reached[id(point)]
            self.findings.append(
                f"CutPoint {name} is used twice, at {before} and {where}: make one for each place"
            )
            return
        self._reached[id(point)] = where, point
        position = self._position()
        self._marks.append(Mark("cut", name, position, position, where))

    def entered(self, name: str, where: str) -> None:
        self._check_nesting(name, where)
        self._end_begun()
        position = self._position()
        self._open.append(Mark("block", name, position, position, where))

    def left(self, name: str) -> None:
        if not self._open:  # the recording began inside the block
            return
        mark = self._open.pop()
        if not self._open:
            self._close(mark, self._position())

    def begun(self, name: str, module: nn.Module, where: str) -> None:
        self._called.add(id(module))
        if self._open:
            self._check_nesting(name, where)
            return
        self._end_begun()
        position = self._position()
        self._begun = Mark("block", name, position, position, where)

    def finish(self, end: int) -> None:
        """Close what is open at the end of the recording; note which marks were not reached."""
        self._end_begun(end)
        for name, point in self._points.values():
            if id(point) not in self._reached:
                self.findings.append(
                    f"CutPoint {name} was never reached: call it in forward, or remove it"
                )
        for key, (name, block) in self._begins.items():
            if key not in self._called:
                self.findings.append(
                    f"block {block!r} was never reached: it begins at {name or 'the model'}, "
                    "which was not called"
                )

    def _check_nesting(self, name: str, where: str) -> None:
        if self._open:
            outer = self._open[-1]
            self.findings.append(
                f"block {name!r} ({where}) begins inside block {outer.name!r} ({outer.where}): "
                "blocks cannot be nested, end one before the next begins"
            )

    def _end_begun(self, end: int | None = None) -> None:
        if self._begun is not None:
            self._close(self._begun, self._position() if end is None else end)
            self._begun = None

    def _close(self, mark: Mark, end: int) -> None:
        self._marks.append(replace(mark, end=end))
