"""What a forward ran under, so that R can run under the same when the caller's backward comes.

out = pipe(x)          train(), default dtype, kernels of attention ... are noted here
...                    the caller may switch any of them
loss.backward()        R: a forward again, under what was noted

(caller.py: the modes of the thread, autocast among them.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.backends import cuda

_Mode = tuple[Callable[[], Any], Callable[[Any], Any]]


def _matmul_precision() -> str | None:
    """Return what ``torch.set_float32_matmul_precision`` was given.

    None where torch refuses to say it, because precisions of backends were set one by one.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _precisions() -> Iterator[_Mode]:
    """Yield ``fp32_precision`` of all backends, which torch has since 2.9.

    Those for several operations come first: one for a single operation reads like them until it has
    a value of its own.
    """
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    for owner, names in (
        (torch.backends, ()),
        (cudnn, ("conv", "rnn")),
        (mkldnn, ("matmul", "conv", "rnn")),
        (cuda.matmul, ()),
    ):
        for each in (owner, *(getattr(owner, name, None) for name in names)):
            if hasattr(each, _PRECISION):
                yield _attribute(each, _PRECISION)


def _attribute(owner: Any, name: str) -> _Mode:
    return partial(getattr, owner, name), partial(setattr, owner, name)


_PRECISION = "fp32_precision"
_PROCESS_MODES: tuple[_Mode, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    # Which kernels may be chosen: torch.backends.mkldnn.flags(enabled=False), say, on the CPU.
    _attribute(torch.backends.mkldnn, "enabled"),
    _attribute(torch.backends.cudnn, "enabled"),
    # Which kernels of attention may be chosen, also on the CPU: torch.nn.attention.sdpa_kernel.
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (_matmul_precision, _set_matmul_precision),  # sets some of the following
    *_precisions(),
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
