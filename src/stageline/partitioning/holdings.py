"""What a rank holds at its worst, as counts: so that the bytes of many cuts need one pass only.

Between two actions a rank holds, of each of its stages, some whole activations, some inputs that
wait for R, and some halves that wait for W. Bytes are a sum of these counts times sizes, none of
them negative, so only moments count that no other exceeds in everything:

    1F1B, rank 1 of 4     3 whole                                 one moment is enough
    1F1B with R           1 whole and 2 inputs, 0 whole and 3 inputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stageline.scheduling import Kind, Schedule
from stageline.scheduling.schedule import Row

Counts = NDArray[np.int64]

WHOLE, INPUT, HALF = range(3)
"""What is held of a stage and microbatch: everything, its input, or what I left for W."""

_CHANGES = np.zeros((len(Kind), 3), dtype=np.int64)
_CHANGES[Kind.FORWARD, WHOLE] = 1
_CHANGES[Kind.RECOMPUTE] = (1, -1, 0)
_CHANGES[Kind.INPUT_GRADIENT] = (-1, 0, 1)
_CHANGES[Kind.WEIGHT_GRADIENT, HALF] = -1
_CHANGES[Kind.BACKWARD, WHOLE] = -1


@dataclass(frozen=True)
class Holding:
    """How many microbatches a stage holds at one moment, by what it holds of them.

    Attributes:
        whole: All that F keeps.
        halved: What I has not released.
        inputs: The input alone; R will bring the rest.
    """

    whole: int
    halved: int = 0
    inputs: int = 0


@dataclass(frozen=True, eq=False)
class Holdings:
    """The worst moments of each rank.

    Example:
        >>> from stageline.scheduling.schedules import one_f_one_b
        >>> holdings = Holdings.of(one_f_one_b(num_stages=3, num_microbatches=5))
        >>> [holdings.peak(rank, [(10, 1, 0)]) for rank in range(3)]
        [30, 20, 10]

    Attributes:
        stages: The stages of each rank.
        moments: For each rank, a row for each moment: whole, input and half of its first stage,
            then of its second, and so on.
    """

    stages: tuple[tuple[int, ...], ...]
    moments: tuple[Counts, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Holdings:
        stages = tuple(schedule.stages_of(rank) for rank in range(schedule.num_ranks))
        moments = (_worst(_moments(*each)) for each in zip(schedule.arrays, stages, strict=True))
        return cls(stages, tuple(moments))

    def peak(self, rank: int, sizes: Sequence[tuple[int, int, int]]) -> int:
        """Return the most bytes that a rank holds.

        Args:
            rank: Which.
            sizes: For each of its stages what it keeps of a microbatch from F on, the part of it
                that is the input, and the part of it that I releases.
        """
        each = [(kept, inputs, kept - freed) for kept, inputs, freed in sizes]
        flat = np.array(each, dtype=np.int64).ravel()
        return int((self.moments[rank] @ flat).max(initial=0))

    def by_stage(self) -> list[tuple[Holding, ...]]:
        """Return the moments of each stage, as if it had a rank to itself."""
        found: dict[int, tuple[Holding, ...]] = {}
        for stages, moments in zip(self.stages, self.moments, strict=True):
            for column, stage in enumerate(stages):
                own = _worst(moments[:, 3 * column : 3 * column + 3]).tolist()
                found[stage] = tuple(Holding(whole, half, inputs) for whole, inputs, half in own)
        return [found[stage] for stage in sorted(found)]


def holdings_of(schedule: Schedule) -> list[tuple[Holding, ...]]:
    """Return for each stage the moments at which it holds most; one is enough where none is less.

    Example:
        >>> from stageline.scheduling.schedules import one_f_one_b
        >>> [stage[0].whole for stage in holdings_of(one_f_one_b(3, 8))]
        [3, 2, 1]
    """
    if not schedule.has_backward:
        return [(Holding(1),)] * schedule.num_stages
    return Holdings.of(schedule).by_stage()


def holdings_of_1f1b(num_stages: int) -> list[tuple[Holding, ...]]:
    """Return what 1F1B holds with microbatches enough, one stage per rank."""
    return [(Holding(num_stages - stage),) for stage in range(num_stages)]


def _moments(row: Row, stages: tuple[int, ...]) -> Counts:
    """Return what is held after each action."""
    changes = _CHANGES[row["kind"]]
    slot = row["stage"].astype(np.int64) << 32 | row["microbatch"]
    later = np.isin(slot, slot[row["kind"] == Kind.RECOMPUTE]) & (row["kind"] == Kind.FORWARD)
    changes[later] = (0, 1, 0)
    column = np.searchsorted(np.array(stages), row["stage"])
    spread = np.zeros((len(row), len(stages), 3), dtype=np.int64)
    spread[np.arange(len(row)), column] = changes
    held: Counts = np.cumsum(spread, axis=0).reshape(len(row), -1)
    return held


def _worst(moments: Counts) -> Counts:
    """Drop moments at which no count is higher than at some other."""
    left = moments[np.unique(_coded(moments), return_index=True)[1]]
    left = left[np.argsort(-left.sum(axis=1), kind="stable")]
    worst: list[Counts] = []
    while len(left):
        worst.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.array(worst, dtype=np.int64).reshape(len(worst), moments.shape[1])


def _coded(moments: Counts) -> Counts:
    """Return a number for each moment, the same for the same counts: to find them is faster so."""
    bases = moments.max(axis=0, initial=0) + 1
    if np.log2(bases.astype(np.float64)).sum() > 62:
        return np.unique(moments, axis=0, return_inverse=True)[1].ravel()
    places = np.concatenate([[1], np.cumprod(bases[:-1])])
    coded: Counts = moments @ places
    return coded
