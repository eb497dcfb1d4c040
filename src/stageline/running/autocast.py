"""Autocast, as a step needs it: weight cache off in forward, all of it off in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch


def autocast_devices() -> list[str]:
    """Return the device types for which autocast is on in this thread."""
    return [device for device in _device_types() if torch.is_autocast_enabled(device)]


@cache
def _device_types() -> tuple[str, ...]:
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class autocast_suspended:  # used like a function
    """Switch autocast off: the kernels of backward were chosen in forward, by the dtypes they saw.

    A class, because it stands around every backward: a generator would cost as much as a small
    stage.
    """

    __slots__ = ("_devices",)

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices

    def __enter__(self) -> None:
        for device in self._devices:
            torch.set_autocast_enabled(device, False)

    def __exit__(self, *_: object) -> None:
        for device in self._devices:
            torch.set_autocast_enabled(device, True)


@contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Cast weights anew for every microbatch.

    The cache belongs to the process, not to a thread, and ties the graphs of different microbatches
    together; gradients must not depend on who filled it first.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
