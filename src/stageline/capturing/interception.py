"""Every call of a module seen, for a time and in one thread: the calls that a recording is made of.

``nn.Module.__call__`` and, for classes that override it, their own; and ``forward`` of the classes
in the model, because some models call ``layer.forward(x)`` directly. One call is reported once,
however many of these methods it goes through:

    layer(x)  ->  Layer.__call__  ->  nn.Module.__call__  ->  Layer.forward  ->  Base.forward
                  reported            the same call           the same call      the same call
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from inspect import getattr_static, isfunction
from typing import Any

import torch
from torch import nn

from stageline.capturing.naming import named_everywhere
from stageline.torch_private import compiler_is_loaded

CallHandler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_Method = tuple[type, str]  # a class and the name of one of its methods
_Step = tuple[str, Any]  # the name of a method and the function behind it
_Proceed = Callable[..., Any]


@contextmanager
def intercepted(model: nn.Module, handler: CallHandler) -> Iterator[None]:
    """Route every call of a module in this thread through a handler.

    The handler gets the module, what carries out the call, and its arguments; it returns the
    result. Inside another interception of the same thread, the inner handler comes first and its
    ``call`` leads to the outer one. Classes are patched for the time of the context, so other
    threads go through the patches too; they are let through at once.

    A ``forward`` that is no plain function (a static method) is seen only through ``__call__``, and
    script modules only from outside. Compiled modules run uncompiled meanwhile: the compiler would
    trace the patches.

    Example:
        >>> import torch
        >>> seen = []
        >>> def note(module, call, args, kwargs):
        ...     seen.append(type(module).__name__)
        ...     return call(*args, **kwargs)
        >>> model = nn.Sequential(nn.ReLU(), nn.Tanh())
        >>> with intercepted(model, note):
        ...     _ = model(torch.zeros(1))
        >>> seen
        ['Sequential', 'ReLU', 'Tanh']
    """
    methods = _methods(model)
    routers = _thread.routers
    router = _Router(handler)
    with _uncompiled.held(), _patches.held(methods):
        routers.append(router)
        try:
            yield
        finally:
            routers.remove(router)


def _methods(model: nn.Module) -> list[_Method]:
    """Return what to patch: the methods through which calls of this model's modules go."""
    kinds: dict[type, None] = {nn.Module: None}
    for module in named_everywhere(model).values():
        kinds.update(dict.fromkeys(type(module).__mro__))
    return [
        (kind, name)
        for kind in kinds
        # The methods of script modules are C++; forward of nn.Module itself only raises.
        if issubclass(kind, nn.Module) and not issubclass(kind, torch.jit.ScriptModule)
        for name in ("__call__", "forward")
        if (kind, name) != (nn.Module, "forward") and isfunction(vars(kind).get(name))
    ]


class _Patches:
    """The methods that are patched now, and by how many interceptions.

    Each is patched once, however many threads record: otherwise the first to end would take the
    patches of the others away, and the last would put the patches of the first back for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[_Method, int] = {}
        self._originals: dict[_Method, Any] = {}

    @contextmanager
    def held(self, methods: list[_Method]) -> Iterator[None]:
        taken: list[_Method] = []
        try:
            with self._lock:
                for method in methods:
                    self._take(method)
                    taken.append(method)
            yield
        finally:
            with self._lock:
                for method in reversed(taken):
                    self._give_back(method)

    def _take(self, method: _Method) -> None:
        kind, name = method
        if method not in self._originals:
            original = vars(kind)[name]
            setattr(kind, name, _routed(original, name))
            self._originals[method] = original
        self._holders[method] = self._holders.get(method, 0) + 1

    def _give_back(self, method: _Method) -> None:
        kind, name = method
        self._holders[method] -= 1
        if not self._holders[method]:
            del self._holders[method]
            setattr(kind, name, self._originals.pop(method))


class _Uncompiled:
    """Whether compiled code runs uncompiled now, and for how many interceptions.

    The stance of the compiler belongs to the whole process: were each to set it and put back what
    it found, the last to end would leave behind what the first had set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        self._stance: AbstractContextManager[Any] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            # Importing the compiler takes seconds; if nobody did, nothing is compiled.
            if self._stance is None and compiler_is_loaded():
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._num_holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                if not self._num_holders and self._stance is not None:
                    self._stance.__exit__(None, None, None)
                    self._stance = None


class _Thread(threading.local):
    """Whose interceptions the calls of this thread go through, the innermost last."""

    def __init__(self) -> None:
        self.routers: list[_Router] = []


class _Router:
    """Reports the outermost of the methods that one call of a module goes through."""

    def __init__(self, handler: CallHandler) -> None:
        self._handler = handler
        self._running: list[_Running] = []

    def routed(self, module: nn.Module, step: _Step, proceed: _Proceed) -> _Proceed:
        """Return what does a step of a call: as it is, or, for its first step, by the handler."""

        def route(*args: Any, **kwargs: Any) -> Any:
            running = self._running[-1] if self._running else None
            if running is None or not running.goes_on_with(module, step):
                return self._handler(module, call, args, kwargs)
            running.steps.append(step)
            try:
                return proceed(*args, **kwargs)
            finally:
                running.steps.pop()

        def call(*args: Any, **kwargs: Any) -> Any:
            self._running.append(_Running(module, [step]))
            try:
                return proceed(*args, **kwargs)
            finally:
                self._running.pop()

        vars(call)["is_whole"] = _is_whole(module, step)
        vars(call)["is_direct"] = step[0] == "forward"  # layer.forward(x), without the call
        return route


def _is_whole(module: nn.Module, step: _Step) -> bool:
    """Whether a call does all that calling the module does, not only what a parent class does."""
    name, original = step
    own = getattr_static(type(module), "forward", None)
    return name != "forward" or getattr(own, "__wrapped__", own) is original


class _Running:
    """One call of a module and the methods that it is in at the moment, the outermost first."""

    def __init__(self, module: nn.Module, steps: list[_Step]) -> None:
        self.module = module
        self.steps = steps

    def goes_on_with(self, module: nn.Module, step: _Step) -> bool:
        """Whether a method is one more step of this call, not a call of its own.

        It is for an override that calls its parent class, and for a call that comes to its
        forward. A forward that calls its own module again has begun another call.
        """
        if module is not self.module or step in self.steps:
            return False
        return step[0] == "forward" or self.steps[-1][0] != "forward"


def _routed(original: Any, name: str) -> Any:
    step = (name, original)

    # Positional only: a forward may have an argument that is called module.
    @wraps(original)
    def routed(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        routers = _thread.routers
        if not routers:
            return original(module, *args, **kwargs)
        proceed: _Proceed = partial(original, module)
        for router in routers:  # the outermost first, so that it comes behind the others
            proceed = router.routed(module, step, proceed)
        return proceed(*args, **kwargs)

    return routed


_uncompiled = _Uncompiled()
compiler_off = _uncompiled.held
"""A context in which what is compiled runs as it was written, in all threads."""

_patches = _Patches()  # classes belong to the whole process, and so does what was done to them
_thread = _Thread()
