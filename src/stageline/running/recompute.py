"""Recompute while it runs: which run a layer is in, and draws that R could not repeat.

F   a forward whose graph is dropped      is_checkpointing()
R   the same forward again                is_recomputing()
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from stageline.errors import CaptureError

Generators = Sequence[tuple[str, Callable[[], Any]]]
"""Generators by name, each with what reads its state."""


# Context variables and not thread-locals: a pipeline inside a stage takes them into its threads.
_is_checkpointing: ContextVar[bool] = ContextVar("_is_checkpointing", default=False)
_is_recomputing: ContextVar[bool] = ContextVar("_is_recomputing", default=False)


def is_checkpointing() -> bool:
    """Return whether the layer that asks runs in a forward that will be recomputed.

    Example:
        >>> is_checkpointing()
        False
    """
    return _is_checkpointing.get()


def is_recomputing() -> bool:
    """Return whether the layer that asks runs for the second time, before its backward.

    A layer that counts its calls, or logs, leaves that out then.

    Example:
        >>> is_recomputing()
        False
    """
    return _is_recomputing.get()


@contextmanager
def checkpointing(generators: Generators) -> Iterator[None]:
    """Run a forward that R will run again.

    Raises:
        CaptureError: It drew numbers that R would not draw again.
    """
    before = [read() for _, read in generators]
    with _set(_is_checkpointing):
        yield
    for (name, read), state in zip(generators, before, strict=True):
        if read() != state:
            raise CaptureError(
                f"{name} was drawn from while a stage ran that is recomputed: the second run would "
                "draw other numbers, and the gradients would be those of another forward. Draw "
                "with torch (torch.rand, F.dropout), or leave the stage out of recompute=. If "
                "another stage or thread drew meanwhile, give that one a generator of its own: "
                "random.Random(), numpy.random.default_rng()"
            )


@contextmanager
def recomputing() -> Iterator[None]:
    """Run a forward for the second time."""
    with _set(_is_recomputing):
        yield


@contextmanager
def _set(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def generators_of(stage: nn.Module) -> Generators:
    """Return all generators but torch's default one that a stage is known to reach.

    Those of Python and numpy, and those that its modules hold as attributes.
    """
    found: list[tuple[str, Callable[[], Any]]] = [
        ("Python's random", random.getstate),
        ("numpy.random", _numpy_state),
    ]
    for path, module in stage.named_modules():
        for name, value in vars(module).items():
            read = _reader(value)
            if read is not None:
                found.append((f"the generator {f'{path}.{name}'.lstrip('.')}", read))
    return found


def _reader(value: Any) -> Callable[[], Any] | None:
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return lambda: str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return lambda: _comparable(value.get_state())
    has_state = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return value.getstate if has_state else None


def _numpy_state() -> tuple[Any, ...]:
    return _comparable(np.random.get_state())


def _comparable(state: Any) -> tuple[Any, ...]:
    """Return a state of numpy's with bytes for its array."""
    return tuple(each.tobytes() if isinstance(each, np.ndarray) else each for each in state)
