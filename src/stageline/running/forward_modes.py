"""What a forward ran under, so that R can run under the same when the caller's backward comes.

out = pipe(x)          train(), default dtype, kernels of attention ... are noted here
...                    the caller may switch any of them
loss.backward()        R: a forward again, under what was noted

(caller.py: the modes of the thread, autocast among them.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.backends import cuda

_PROCESS_MODES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    # Which kernels of attention may be chosen, also on the CPU: torch.nn.attention.sdpa_kernel.
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
"""Modes of the process, each with what reads and what sets it."""


class ForwardModes:
    """The modes of the process, and the flags of modules, at the time of a forward.

    Args:
        modules: Those that the forward may call.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._flags = _Flags(modules)
        self._process = _process_modes()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under the modes of the process and the flags; put back what was switched."""
        switched, process = self._flags.now(), _process_modes()
        self._flags.set()
        _set_process_modes(self._process)
        try:
            yield
        finally:
            _set_process_modes(process)
            switched.set()


class _Flags:
    """Which modules train, and which of their parameters."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._training = [(module, module.training) for module in modules]
        self._trained = [
            (parameter, parameter.requires_grad)
            for module, _ in self._training
            for parameter in module.parameters(recurse=False)
        ]

    def now(self) -> _Flags:
        """Return the flags that the same modules have by now."""
        return _Flags(module for module, _ in self._training)

    def set(self) -> None:
        for module, training in self._training:
            if module.training is not training:
                module.training = training
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)


def _process_modes() -> list[Any]:
    return [read() for read, _ in _PROCESS_MODES]


def _set_process_modes(modes: Iterable[Any]) -> None:
    for (read, write), mode in zip(_PROCESS_MODES, modes, strict=True):
        if read() != mode:
            write(mode)
