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
        start: Clock reading when its turn came.
        end: Clock reading after it ended.
        waited: Seconds of these in which it waited for its input to arrive.
    """

    rank: int
    action: str
    position: int
    start: float
    end: float
    waited: float


Observer = Callable[[ActionDone], None]
