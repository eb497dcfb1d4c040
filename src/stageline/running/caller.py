"""What a worker thread must know of the thread that called ``step``: its thread-local torch state.

Grad mode, inference mode, autocast, the default device, saved-tensor hooks and context variables
belong to a thread. A user who writes ``with torch.autocast(...): pipe.step(...)`` means the whole
step, so every worker enters what the caller had. (Deterministic mode, default dtype and the sdpa
backend belong to the process already.)
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from stageline.errors import PipeError
from stageline.running.autocast import autocast_cache_off, autocast_devices
from stageline.torch_private import foreign_modes, functorch_level, saved_tensor_hooks

_PLAIN_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class CallerState:
    """The thread-local state of the caller, to be entered by workers."""

    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_device: torch.device
    hooks: tuple[Any, Any] | None
    context: contextvars.Context

    @classmethod
    def capture(cls) -> CallerState:
        """Read the state of the current thread.

        Raises:
            PipeError: A mode is active that cannot be shared between threads.
        """
        refuse_foreign_modes()
        return cls(
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((name, torch.get_autocast_dtype(name)) for name in autocast_devices()),
            default_device=torch.get_default_device(),
            hooks=saved_tensor_hooks(),
            context=contextvars.copy_context(),
        )

    def run(self, function: Callable[[], None], *, builds_graph: bool) -> None:
        """Call a function in another thread as if the caller had called it."""
        # One context can be entered by one thread at a time, hence the copy.
        self.context.copy().run(self._run, function, builds_graph)

    def _run(self, function: Callable[[], None], builds_graph: bool) -> None:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.default_device != _PLAIN_DEVICE:
                stack.enter_context(self.default_device)
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            for name, dtype in self.autocast:
                stack.enter_context(torch.autocast(name, dtype=dtype))
            stack.enter_context(step_modes(builds_graph))
            function()


def refuse_foreign_modes() -> None:
    """Raise if a mode is active that cannot be shared between threads.

    Raises:
        PipeError: It says which.
    """
    modes = foreign_modes()
    if any(mode.__module__.startswith("stageline.") for mode in modes):
        raise PipeError(
            "a stage of a pipeline called another pipeline, and what the first one follows in its "
            "stages, such as random numbers and BatchNorms, cannot follow into the threads of the "
            "ranks of the second: make one pipeline of both"
        )
    if modes:
        names = " and ".join(mode.__name__ for mode in modes)
        raise PipeError(
            f"{names} is active in the calling thread and cannot follow into the "
            "threads of the ranks: leave it before the call"
        )
    if functorch_level() is not None:
        raise PipeError(
            "a transform of torch.func, such as grad or vmap, is active in the calling thread and "
            "cannot follow into the threads of the ranks: use torch.autograd on the outputs"
        )


class step_modes:  # used like a function
    """The modes that a step sets for itself, whoever called it; the caller's come back after it.

    Also if a stage has changed them and failed before it changed them back. Most callers have them
    as they are wanted, and the modes of torch are only touched where they are not.
    """

    __slots__ = ("_before", "_builds_graph", "_cache_off")

    def __init__(self, builds_graph: bool) -> None:
        self._builds_graph = builds_graph
        self._cache_off: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        _set_grad(self._builds_graph)
        if autocast_devices():
            self._cache_off = autocast_cache_off()
            self._cache_off.__enter__()

    def __exit__(self, *error: Any) -> None:
        _set_grad(self._before)
        if self._cache_off is not None:
            self._cache_off.__exit__(*error)


def _set_grad(mode: bool) -> None:
    if torch.is_grad_enabled() is not mode:
        torch.set_grad_enabled(mode)
