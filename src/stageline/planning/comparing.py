"""What was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from stageline.errors import ConfigError
from stageline.wording import milliseconds


class _Event(Protocol):
    rank: int
    position: int
    start: float
    end: float


class Recorded(Protocol):
    """Whatever keeps the events of a pipeline: a ``Recorder``."""

    @property
    def events(self) -> Iterable[Any]: ...


Measured = float | Sequence[float] | Recorded


@dataclass(frozen=True)
class Comparison:
    """A prediction and what came of it.

    Example:
        >>> print(Comparison(predicted=0.110, measured=(0.100, 0.098, 0.104)))
        predicted 110.0 ms, measured 100.0 ms (median of 3, 98 .. 104.0 ms): 10.0 % too long

    Attributes:
        predicted: Seconds of a step.
        measured: Seconds of each step that was measured.
    """

    predicted: float
    measured: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of what was measured."""
        return median(self.measured)

    @property
    def error(self) -> float:
        """By which share of the measured time the prediction is off; above 0 if it is too long."""
        return self.predicted / self.seconds - 1

    def __str__(self) -> str:
        several = ""
        if len(self.measured) > 1:
            low, high = (milliseconds(each(self.measured)) for each in (min, max))
            several = f" (median of {len(self.measured)}, {low} .. {high} ms)"
        direction = "too long" if self.error >= 0 else "too short"
        return (
            f"predicted {milliseconds(self.predicted)} ms, measured {milliseconds(self.seconds)} ms"
            f"{several}: {100 * abs(self.error):.1f} % {direction}"
        )


def seconds_of(measured: object) -> tuple[float, ...]:
    """Return the seconds of each step: given as such, or as the events of some steps.

    Raises:
        ConfigError: There are none.
    """
    events = getattr(measured, "events", None)
    found: Iterable[Any]
    if events is not None:
        found = _steps(list(events))
    else:
        found = measured if isinstance(measured, Iterable) else (measured,)
    found = tuple(found)
    if found and all(isinstance(each, (int, float)) and each > 0 for each in found):
        return tuple(float(each) for each in found)
    wanted = "seconds of a step above 0, several of them, or a Recorder that saw a step"
    raise ConfigError("Proposal.compare", [f"measured: wanted {wanted}, got {measured!r}"])


def _steps(events: Sequence[_Event]) -> list[float]:
    """Return how long each step took: a rank's row begins anew with each."""
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    for rank in {event.rank for event in events}:
        row = sorted((e for e in events if e.rank == rank), key=lambda event: event.start)
        step = 0
        for before, event in pairwise([row[0], *row]):
            step += event.position < before.position
            begin[step] = min(event.start, begin.get(step, event.start))
            end[step] = max(event.end, end.get(step, event.end))
    return [end[step] - begin[step] for step in sorted(begin)]
