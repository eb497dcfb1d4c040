"""Exact numbers as whole ticks, so that machine integers can do the arithmetic.

    1/2, 3, 2/3    are   3, 18, 4   ticks of 1/6

Sums and comparisons of ticks are those of the numbers, without rounding. One float among the
numbers makes them all floats: what is added to it could not be exact any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stageline.scheduling.costs import Number

Ticks: TypeAlias = npt.NDArray[Any]
"""An array of ticks: int64, Python integers where those are too small, or float64."""

SAFE = 2**62
"""No sum of machine integers may reach this."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """A few numbers of ticks, each used by many actions: a table, and which of it each action has.

    Attributes:
        table: The numbers.
        which: For each action, its place in the table; a fraction of the memory of the numbers.
    """

    table: Ticks
    which: npt.NDArray[np.integer[Any]]

    def __getitem__(self, index: Any) -> Any:
        """Return the numbers of some actions, or of one."""
        return self.table[self.which[index]]

    def tolist(self) -> list[Any]:
        """Return the numbers of all actions as Python's; equal ones are the same object."""
        table = self.table.tolist()
        return [table[place] for place in self.which.tolist()]


@dataclass(frozen=True)
class Unit:
    """What one tick is worth.

    >>> unit = Unit.of([Fraction(1, 2), 3, Fraction(2, 3)])
    >>> unit.per_one, unit.ticks(Fraction(2, 3)), unit.number(4)
    (6, 4, Fraction(2, 3))

    Attributes:
        per_one: How many ticks make 1; None where ticks are floats, each worth 1.
        is_whole: Whether all numbers were integers; then results are, too.
    """

    per_one: int | None
    is_whole: bool

    @classmethod
    def of(cls, numbers: Iterable[Number]) -> Unit:
        """Return the largest tick of which all these numbers are multiples."""
        distinct = set(numbers)
        if any(isinstance(number, float) for number in distinct):
            return cls(None, is_whole=False)
        fractions = [number for number in distinct if isinstance(number, Fraction)]
        per_one = math.lcm(*(number.denominator for number in fractions))
        return cls(per_one, is_whole=not fractions)

    def ticks(self, number: Number) -> int | float:
        """Return a number in ticks."""
        return float(number) if self.per_one is None else int(number * self.per_one)

    def tables(self, *tables: Iterable[Number], num_terms: int) -> list[Ticks]:
        """Return several tables of numbers in ticks, as arrays of one type.

        Args:
            tables: The numbers.
            num_terms: How many of each table may be added up, without machine integers overflowing.
                Where they would, the arrays hold Python's.
        """
        ticks = [[self.ticks(number) for number in numbers] for numbers in tables]
        if self.per_one is None:
            return [np.array(table, dtype=np.float64) for table in ticks]
        largest = sum(max(map(abs, table), default=0) for table in ticks)
        dtype = np.int64 if largest * max(num_terms, 1) < SAFE else object
        return [np.array(table, dtype=dtype) for table in ticks]

    def number(self, ticks: int | float) -> Number:
        """Return how much so many ticks are worth."""
        if self.per_one is None:
            return float(ticks)
        return int(ticks) if self.is_whole else Fraction(int(ticks), self.per_one)

    def numbers(self, ticks: Ticks) -> tuple[Number, ...]:
        """Return how much each of several numbers of ticks is worth."""
        plain = ticks.tolist()  # one call for all of them: a hundred times faster
        if self.is_whole or self.per_one is None:
            return tuple(plain)
        return tuple(Fraction(value, self.per_one) for value in plain)
