"""A failed step leaves nothing of itself: no half-summed gradient, no half-updated statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from stageline.errors import StepError
from stageline.partitioning.sharing import keeps_statistics
from stageline.running.control.failures import Aborted
from stageline.running.timetable import Purpose

_HINT = (
    "(Gradients accumulated before this step may now hold a part of it: call zero_grad() before "
    "the next one.)"
)


class Undo:
    """Puts parameters and statistics back when a step fails.

    Args:
        parameters: Those that a step gives gradients to.
        modules: The stages that it runs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Iterable[nn.Module]) -> None:
        self._parameters = tuple(parameters)
        self._normalising = [
            module
            for stage in modules
            for module in stage.modules()
            if getattr(module, "track_running_stats", False)
        ]

    @contextmanager
    def on_failure(self, purpose: Purpose) -> Iterator[None]:
        """Undo what a step has done if it fails."""
        if not purpose.builds_graph:
            yield
            return
        fresh = [parameter for parameter in self._parameters if parameter.grad is None]
        kept = [
            (buffer, buffer.clone())
            for module in self._normalising
            if keeps_statistics(module)
            for buffer in module.buffers(recurse=False)
        ]
        try:
            yield
        except BaseException as failure:
            for parameter in fresh:
                parameter.grad = None
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
            if isinstance(failure, (StepError, Aborted)) and len(fresh) < len(self._parameters):
                failure.hint = f"{getattr(failure, 'hint', '')} {_HINT}".strip()
            raise
