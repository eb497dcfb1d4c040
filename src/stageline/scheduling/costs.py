"""How long the actions of a schedule take, in any unit of time, and what they keep in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import TypeAlias, cast

from stageline.errors import ScheduleError
from stageline.scheduling.action import Kind

Number: TypeAlias = int | float | Fraction
PerStage: TypeAlias = Number | Sequence[Number]
PerPair: TypeAlias = Mapping[tuple[int, int], Number]

DEFAULT_BACKWARD = 2


@dataclass(frozen=True)
class Costs:
    """How long each kind of action takes, and how much it keeps; one number, or one per stage.

    Integers and fractions stay exact in every figure computed from them; floats are allowed.

    >>> Costs(backward=3).per_stage(Kind.INPUT_GRADIENT, num_stages=2)
    (Fraction(3, 2), Fraction(3, 2))
    >>> Costs(forward=5, input_gradient=6, weight_gradient=4).per_stage(Kind.BACKWARD, num_stages=1)
    (10,)

    A value is on its way from the end of the action that made it, for ``latency`` and, where a
    bandwidth is given, ``edge_bytes / bandwidth``. That occupies neither rank, and values do not
    hold up each other, however many are on the way. Between stages of one rank it takes no time.

    Attributes:
        forward: F.
        backward: B, the full backward; unless given, I and W together, or 2.
        input_gradient: I; half of B unless given.
        weight_gradient: W; half of B unless given.
        recompute: R; as long as F unless given.
        pair: F and B of a pair together, which overlap; the sum of the two unless given.
        latency: Of a hop to another rank; one number, one per cut (the first is between stages 0
            and 1), or one for each pair of ranks: ``{(0, 1): 5, (1, 0): 7}``.
        bandwidth: Bytes per unit of time, given like the latency; no limit unless given.
        edge_bytes: How large a value is, either way; one number, or one per cut.
        activation_bytes: What a stage keeps of one microbatch from F, or from R where it is
            recomputed, until the backward; its input included.
        input_bytes: The part of them that is the input; kept from F on, also where R follows.
        input_gradient_frees: The part of them that I releases; W releases the rest, B all. Less
            than nothing where I keeps more gradients for W than it releases.
    """

    forward: PerStage = 1
    backward: PerStage | None = None
    input_gradient: PerStage | None = None
    weight_gradient: PerStage | None = None
    recompute: PerStage | None = None
    latency: PerStage | PerPair = field(default=0, hash=False)
    bandwidth: PerStage | PerPair | None = field(default=None, hash=False)
    edge_bytes: PerStage = 0
    activation_bytes: PerStage | None = None
    input_bytes: PerStage = 0
    input_gradient_frees: PerStage = 0
    pair: Number | None = None

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _clean_all(name, value))
        halves = (self.input_gradient, self.weight_gradient)
        if self.backward is None and halves.count(None) == 1:
            raise ScheduleError(
                "costs: of the two halves of the backward one is given: "
                "give input_gradient and weight_gradient, or backward"
            )

    def per_stage(self, kind: Kind, num_stages: int) -> tuple[Number, ...]:
        """Return how long an action of this kind takes on each stage.

        Raises:
            ScheduleError: The costs were given for another number of stages.
        """
        if kind is Kind.REDUCE:
            return (0,) * num_stages
        name = kind.name.lower()
        if getattr(self, name) is not None:
            return self.of_stages(name, num_stages)
        if kind is Kind.RECOMPUTE:
            return self.per_stage(Kind.FORWARD, num_stages)
        if kind is not Kind.BACKWARD:
            return tuple(_half(cost) for cost in self.per_stage(Kind.BACKWARD, num_stages))
        if self.input_gradient is None:
            return (DEFAULT_BACKWARD,) * num_stages
        halves = (
            self.per_stage(half, num_stages) for half in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        )
        return tuple(inputs + weights for inputs, weights in zip(*halves, strict=True))

    def of_stages(self, name: str, num_stages: int) -> tuple[Number, ...]:
        """Return what an attribute that is given says of each stage.

        Raises:
            ScheduleError: It was given for another number of stages.
        """
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * num_stages
        if len(value) != num_stages:
            raise ScheduleError(
                f"costs: {name} is given for {len(value)} stages, the schedule has {num_stages}: "
                f"give one number per stage, or one for all"
            )
        return value

    @property
    def hops_are_alike(self) -> bool:
        """Whether a value takes equally long over every cut and between all ranks."""
        given = (self.latency, self.bandwidth, self.edge_bytes)
        return not any(isinstance(value, tuple | Mapping) for value in given)

    def hop(self, cut: int, num_cuts: int, source: int, destination: int) -> Number:
        """Return how long a value takes over a cut, from one rank to another.

        >>> costs = Costs(latency={(0, 1): 5}, bandwidth=2, edge_bytes=[6, 9])
        >>> costs.hop(1, num_cuts=2, source=0, destination=1)
        Fraction(19, 2)

        Raises:
            ScheduleError: The costs were given for another number of cuts, or not for these ranks.
        """
        way = (cut, num_cuts, source, destination)
        latency = self._of_hop("latency", *way)
        if self.bandwidth is None:
            return latency
        size, bandwidth = (self._of_hop(name, *way) for name in ("edge_bytes", "bandwidth"))
        if bandwidth == 0:
            raise ScheduleError("costs: bandwidth is 0: give more, or leave it out for no limit")
        if isinstance(size, float) or isinstance(bandwidth, float):
            return latency + size / bandwidth
        return latency + _whole(Fraction(size) / bandwidth)

    def _of_hop(self, name: str, cut: int, num_cuts: int, source: int, destination: int) -> Number:
        value = getattr(self, name)
        if isinstance(value, Mapping):
            if (source, destination) not in value:
                raise ScheduleError(
                    f"costs: {name} is not given from rank {source} to rank {destination}: add it"
                )
            number: Number = value[source, destination]
            return number
        if not isinstance(value, tuple):
            return cast(Number, value)
        if len(value) != num_cuts:
            raise ScheduleError(
                f"costs: {name} is given for {len(value)} cuts, the schedule has {num_cuts}: "
                f"give one number per cut, or one for all"
            )
        return cast(Number, value[cut])


def number_text(number: Number) -> str:
    """Write a number for people: fractions as a decimal where that is exact, floats rounded.

    >>> number_text(Fraction(57, 2)), number_text(Fraction(1, 3)), number_text(Fraction(4))
    ('28.5', '1/3', '4')
    """
    if isinstance(number, Fraction) and number.denominator != 1:
        decimal = str(float(number))
        return decimal if Fraction(decimal) == number else str(number)
    return f"{number:.10g}" if isinstance(number, float) else str(number)


def _clean_all(
    name: str, value: object
) -> Number | tuple[Number, ...] | dict[tuple[int, int], Number]:
    by_hop = name in ("latency", "bandwidth")
    if by_hop and isinstance(value, Mapping):
        return {_pair(name, pair): _clean(f"{name} of {pair}", value[pair]) for pair in value}
    if name == "pair" or isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return _clean(name, value)
    what = "cut" if by_hop or name == "edge_bytes" else "stage"
    return tuple(_clean(f"{name} of {what} {place}", item) for place, item in enumerate(value))


def _pair(name: str, pair: object) -> tuple[int, int]:
    if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(end, int) for end in pair):
        return pair
    raise ScheduleError(f"costs: {name} of {pair!r}: name a pair of ranks, such as (0, 1)")


# What I really holds back may be more than it releases: the gradients that W will need.
_MAY_BE_NEGATIVE = "input_gradient_frees"


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
    if number < 0 and not name.startswith(_MAY_BE_NEGATIVE):
        raise ScheduleError(f"costs: {name} is {value}: give zero or more")
    return number


def _half(cost: Number) -> Number:
    return cost / 2 if isinstance(cost, float) else _whole(Fraction(cost) / 2)


def _whole(number: Fraction) -> int | Fraction:
    return int(number) if number.denominator == 1 else number
