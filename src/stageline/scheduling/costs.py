"""How long the actions of a schedule take, in any unit of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import TypeAlias

from stageline.errors import ScheduleError
from stageline.scheduling.action import Kind

Number: TypeAlias = int | float | Fraction


@dataclass(frozen=True)
class Costs:
    """How long each kind of action takes; one number, or one per stage.

    Integers and fractions stay exact in every figure computed from them; floats are allowed.

    >>> Costs(backward=3).per_stage(Kind.INPUT_GRADIENT, num_stages=2)
    (Fraction(3, 2), Fraction(3, 2))

    Attributes:
        forward: F.
        backward: B, the full backward.
        input_gradient: I; half of B unless given.
        weight_gradient: W; half of B unless given.
        recompute: R; as long as F unless given.
        pair: F and B of a pair together, which overlap; the sum of the two unless given.
        latency: From the end of an action on one rank until another rank can use its result. It
            occupies neither rank. Between stages of the same rank it is zero.
    """

    forward: Number | Sequence[Number] = 1
    backward: Number | Sequence[Number] = 2
    input_gradient: Number | Sequence[Number] | None = None
    weight_gradient: Number | Sequence[Number] | None = None
    recompute: Number | Sequence[Number] | None = None
    latency: Number = 0
    pair: Number | None = None

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _clean_all(name, value))

    def per_stage(self, kind: Kind, num_stages: int) -> tuple[Number, ...]:
        """Return how long an action of this kind takes on each stage.

        Raises:
            ScheduleError: The costs were given for another number of stages.
        """
        if kind is Kind.REDUCE:
            return (0,) * num_stages
        name = kind.name.lower()
        value = getattr(self, name)
        if value is None and kind is Kind.RECOMPUTE:
            return self.per_stage(Kind.FORWARD, num_stages)
        if value is None:
            return tuple(_half(cost) for cost in self.per_stage(Kind.BACKWARD, num_stages))
        if not isinstance(value, tuple):
            return (value,) * num_stages
        if len(value) != num_stages:
            raise ScheduleError(
                f"costs: {name} is given for {len(value)} stages, the schedule has {num_stages}: "
                f"give one number per stage, or one for all"
            )
        return value


def number_text(number: Number) -> str:
    """Write a number for people: fractions as a decimal where that is exact, floats rounded.

    >>> number_text(Fraction(57, 2)), number_text(Fraction(1, 3)), number_text(Fraction(4))
    ('28.5', '1/3', '4')
    """
    if isinstance(number, Fraction) and number.denominator != 1:
        decimal = str(float(number))
        return decimal if Fraction(decimal) == number else str(number)
    return f"{number:.10g}" if isinstance(number, float) else str(number)


def _clean_all(name: str, value: object) -> Number | tuple[Number, ...]:
    if name in ("latency", "pair") or isinstance(value, str) or not isinstance(value, Iterable):
        return _clean(name, value)
    return tuple(_clean(f"{name} of stage {stage}", item) for stage, item in enumerate(value))


def _clean(name: str, value: object) -> Number:
    """Return a plain Python number, so that numpy's cannot overflow or leak into results."""
    number: Number
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
    elif isinstance(value, Rational) and not isinstance(value, bool):
        number = Fraction(value)
    elif isinstance(value, Real) and math.isfinite(value) and not isinstance(value, bool):
        number = float(value)
    else:
        raise ScheduleError(f"costs: {name} is {value!r}: give a finite number")
    if number < 0:
        raise ScheduleError(f"costs: {name} is {value}: give zero or more")
    return number


def _half(cost: Number) -> Number:
    if isinstance(cost, int):
        return cost // 2 if cost % 2 == 0 else Fraction(cost, 2)
    return cost / 2
