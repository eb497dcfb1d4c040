"""How skip tensors get from the layer that stashes them to the layer that pops them.

Within a partition they lie in a dictionary of the thread. From one partition to the next they
travel beside the value (layout.py says which), so that the pipeline moves, recomputes and
differentiates them like any other tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from stageline.compat.fairscale.nn.pipe.skip.namespace import Namespace

SkipKey = tuple[Namespace | None, str]
Skips = dict[SkipKey, Tensor | None]


class _Current(threading.local):
    """The skip tensors that wait to be popped, of each thread its own."""

    def __init__(self) -> None:
        self.skips: Skips = {}


_current = _Current()


def current_skips() -> Skips:
    """Return the skip tensors of this thread that wait to be popped."""
    return _current.skips


@contextmanager
def carrying(skips: Skips) -> Iterator[None]:
    """Let the layers that run here stash into a dictionary and pop from it, and only these."""
    before, _current.skips = _current.skips, skips
    try:
        yield
    finally:
        _current.skips = before
