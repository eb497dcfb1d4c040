"""What the executor tells an observer: one record per action, free when nobody listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActionDone:
    """One action has ended.

    Attributes:
        rank: Who ran it.
        action: Its text form, ``2F0``.
        position: Its place in the rank's row.
        start: Clock reading before it began, waits for its inputs included.
        end: Clock reading after it ended.
    """

    rank: int
    action: str
    position: int
    start: float
    end: float


Observer = Callable[[ActionDone], None]
