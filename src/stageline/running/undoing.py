"""A failed call leaves nothing of itself: no half-summed gradient, no half-updated statistics."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stageline.errors import StepError
from stageline.partitioning.sharing import keeps_statistics
from stageline.running.control.failures import Aborted
from stageline.torch_private import (
    GRADIENT_HOOKS,
    copy_all,
    has_gradient_hooks,
    run_backward,
)

_HINT = (
    "(Gradients accumulated before this step may now hold a part of it: call zero_grad() before "
    "the next one.)"
)


class Undo:
    """Puts parameters and statistics back when a call fails.

    Attributes:
        parameters: Those that a step gives gradients to.

    Args:
        parameters: Those that a step gives gradients to.
        modules: The stages that it runs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Iterable[nn.Module]) -> None:
        self.parameters = tuple(parameters)
        self._normalising = [
            module
            for stage in modules
            for module in stage.modules()
            if getattr(module, "track_running_stats", False)
        ]
        self._copies: list[Tensor] = []  # written to at every step, for making them takes longer

    @contextmanager
    def on_failure(self, *, gradients: bool) -> Iterator[None]:
        """Put statistics back if a call fails.

        Args:
            gradients: Whether the call accumulates gradients, which are forgotten then.
        """
        given = self.parameters if gradients else ()
        fresh = [parameter for parameter in given if parameter.grad is None]
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
            if isinstance(failure, (StepError, Aborted)) and len(fresh) < len(given):
                failure.hint = f"{getattr(failure, 'hint', '')} {_HINT}".strip()
            raise

    @contextmanager
    def set_aside(self, returned: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
        """Let a backward begin without gradients, and add it to those that were there at its end.

        So does autograd: it sums what one backward gives a parameter before it calls the hooks of
        the parameter and accumulates that.

        Args:
            returned: Parameters whose gradients are not added but put into the list that the
                context gives, for autograd to do what the caller has asked it for.
        """
        before = [(parameter, parameter.grad) for parameter in self.parameters]
        goes_out = set(map(id, returned))
        made: list[Tensor | None] = []
        added: list[tuple[nn.Parameter, Tensor | None]] = []
        for parameter, _ in before:
            parameter.grad = None
        try:
            with _without_hooks(self.parameters):
                yield made
            added = [(parameter, parameter.grad) for parameter in self.parameters]
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
        made += [gradient for parameter, gradient in added if id(parameter) in goes_out]
        for parameter, gradient in reversed(added):  # hooks expect the last layer first
            if gradient is None or id(parameter) in goes_out:
                continue
            if parameter.requires_grad:  # not if it was frozen since its forward
                _accumulate(parameter, gradient)

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


@contextmanager
def _without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let no hook be called with gradients of these parameters."""
    tables = [
        (parameter, name, table)
        for parameter in parameters
        for name in GRADIENT_HOOKS
        if (table := getattr(parameter, name))
    ]
    for parameter, name, _ in tables:
        # An empty table: after None, torch would go on calling those of the second kind.
        setattr(parameter, name, OrderedDict())
    try:
        yield
    finally:
        for parameter, name, table in tables:
            setattr(parameter, name, table)


def _accumulate(parameter: nn.Parameter, added: Tensor) -> None:
    before = parameter.grad
    if has_gradient_hooks(parameter):
        run_backward([parameter], [added])  # which calls them
    elif before is None or before.is_sparse:
        parameter.grad = added if before is None else added + before
    else:
        with torch.no_grad():
            before.add_(added)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and one.device == other.device
