"""no_grad and autocast regions of opened code: noted for each node, entered again in each stage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled  # the name in torch is patched while a recording runs


class Region(NamedTuple):
    """What differs, at one node, from what surrounds the whole model.

    Attributes:
        grad: Whether gradients are enabled; None: as for the whole model.
        autocast: The autocast regions entered, outermost first.
    """

    grad: bool | None = None
    autocast: tuple[tuple[str, torch.dtype | None, bool, bool | None], ...] = ()


EVERYWHERE = Region()


class Regions:
    """Keeps track of the regions that opened code enters."""

    def __init__(self) -> None:
        self._ambient_grad = torch.is_grad_enabled()
        self.num_enabled = 0  # scopes of enable_grad
        self._autocast: list[tuple[str, torch.dtype | None, bool, bool | None]] = []

    def begin(self) -> None:
        """Note what surrounds the model."""
        self._ambient_grad = torch.is_grad_enabled()

    def current(self) -> Region:
        grad = is_grad_enabled()
        is_ambient = grad == self._ambient_grad and not (grad and self.num_enabled)
        return Region(None if is_ambient else grad, tuple(self._autocast))

    def enter_autocast(self, autocast: Any) -> None:
        cache = getattr(autocast, "_cache_enabled", None)
        self._autocast.append((autocast.device, autocast.fast_dtype, autocast._enabled, cache))

    def leave_autocast(self) -> None:
        self._autocast.pop()


@contextmanager
def entered(region: Region) -> Iterator[None]:
    """Run nodes as if inside the region they were recorded in."""
    with ExitStack() as stack:
        if region.grad is not None:
            stack.enter_context(torch.set_grad_enabled(region.grad))
        for device, dtype, enabled, cache in region.autocast:
            stack.enter_context(
                torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
            )
        yield


class _Open(threading.local):
    """The region that the code of a stage is in; calls may run in several threads."""

    region: Any = None


_open = _Open()


def begin_region(region: Region) -> None:
    """Enter a region; a node of a stage's graph."""
    _open.region = entered(region)
    _open.region.__enter__()


def end_region() -> None:
    """Leave it, also when the code of a stage has failed inside."""
    region, _open.region = _open.region, None
    if region is not None:
        region.__exit__(None, None, None)
