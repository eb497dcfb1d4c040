"""What every contestant is: a step to take, again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """A model in training.

    Attributes:
        step: Trains one batch, the optimizer's step included; returns the loss where it is known.
        close: Lets go of threads and connections.
        tied: Whether a block that is called again is one block; else every call has a copy.
    """

    step: Callable[[], Tensor | None]
    close: Callable[[], None] = _nothing
    tied: bool = True
