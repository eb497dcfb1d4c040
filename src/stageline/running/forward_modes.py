"""What a forward ran under, so that R can run under the same when the caller's backward comes.

out = pipe(x)          autocast, train(), default dtype ... are noted here
...                    the caller may switch any of them
loss.backward()        R: a forward again, under what was noted
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from stageline.running.caller import CallerState


class ForwardModes:
    """The modes of the thread and of the process at the time of a forward.

    Attributes:
        caller: Those of the thread, for the workers to enter.

    Args:
        modules: Those whose training flags decide what the forward computes.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.caller = CallerState.capture()
        self._flags = [(module, module.training) for module in modules]
        self._process = _process_modes()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under the modes of the process and the training flags; put back what was switched."""
        flags = [(module, module.training) for module, _ in self._flags]
        process = _process_modes()
        _set_flags(self._flags)
        _set_process_modes(self._process)
        try:
            yield
        finally:
            _set_process_modes(process)
            _set_flags(flags)


_ProcessModes = tuple[torch.dtype, str, bool, bool]


def _process_modes() -> _ProcessModes:
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_process_modes(modes: _ProcessModes) -> None:
    if modes == _process_modes():
        return
    dtype, precision, is_deterministic, warn_only = modes
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warn_only)


def _set_flags(flags: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in flags:
        if module.training is not training:
            module.training = training
