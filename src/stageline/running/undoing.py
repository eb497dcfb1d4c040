"""A failed step leaves nothing of itself: no half-summed gradient, no half-updated statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stageline.errors import StepError
from stageline.partitioning.sharing import keeps_statistics
from stageline.running.control.failures import Aborted
from stageline.running.timetable import Purpose
from stageline.torch_private import copy_all

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
        self._copies: list[Tensor] = []  # written to at every step, for making them takes longer

    @contextmanager
    def on_failure(self, purpose: Purpose) -> Iterator[None]:
        """Undo what a step has done if it fails."""
        if not purpose.builds_graph:
            yield
            return
        fresh = [parameter for parameter in self._parameters if parameter.grad is None]
        statistics = self._statistics()
        self._keep(statistics)
        try:
            yield
        except BaseException as failure:
            for parameter in fresh:
                parameter.grad = None
            with torch.no_grad():
                for buffer, before in zip(statistics, self._copies, strict=True):
                    buffer.copy_(before)
            if isinstance(failure, (StepError, Aborted)) and len(fresh) < len(self._parameters):
                failure.hint = f"{getattr(failure, 'hint', '')} {_HINT}".strip()
            raise

    @contextmanager
    def accumulated_at_once(self) -> Iterator[None]:
        """Let a backward begin without gradients, and add it to those that were there at its end.

        So does autograd: it sums what one backward gives a parameter before it accumulates that.
        """
        before = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        made: list[Tensor | None] = [None] * len(before)
        try:
            yield
            made = [parameter.grad for parameter, _ in before]
        finally:
            with torch.no_grad():
                for (parameter, gradient), added in zip(before, made, strict=True):
                    if added is None or not gradient.is_sparse:
                        parameter.grad = gradient if added is None else gradient.add_(added)
                    else:
                        parameter.grad = added + gradient

    def _statistics(self) -> list[Tensor]:
        return [
            buffer
            for module in self._normalising
            if keeps_statistics(module)
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def _keep(self, statistics: list[Tensor]) -> None:
        """Copy statistics, all at once into the copies of the step before, where these fit."""
        copies = self._copies
        fit = len(copies) == len(statistics) and all(map(_are_alike, copies, statistics))
        if not fit:
            self._copies = [buffer.clone() for buffer in statistics]
        elif copies:
            copy_all(statistics, copies)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and one.device == other.device
