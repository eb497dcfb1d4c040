"""What a schedule makes of stages that are not equally long: a first look, without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.scheduling import Costs, Schedule, simulate


@dataclass(frozen=True)
class Forecast:
    """Shares of the ranks' time in which they wait.

    Attributes:
        even_bubble: If all stages took equally long: what the schedule itself costs.
        bubble: If a stage took as long as its weight says.
    """

    even_bubble: float
    bubble: float

    def __str__(self) -> str:
        return f"bubble {self.even_bubble:.0%} with equal stages, {self.bubble:.0%} with these"


def forecast(schedule: Schedule, weights: Sequence[int]) -> Forecast:
    """Simulate a schedule with stages as heavy as given; a backward takes twice a forward.

    Example:
        >>> from stageline.scheduling import schedules
        >>> print(forecast(schedules.one_f_one_b(2, 4), [30, 10]))
        bubble 20% with equal stages, 33% with these
    """
    heavy = [max(weight, 1) for weight in weights]
    costs = Costs(forward=heavy, backward=[2 * weight for weight in heavy])
    return Forecast(
        even_bubble=float(simulate(schedule).bubble),
        bubble=float(simulate(schedule, costs).bubble),
    )
