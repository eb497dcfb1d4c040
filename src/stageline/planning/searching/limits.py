"""How much each rank may hold: in activations, or in bytes where the costs know their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from stageline.errors import ScheduleError
from stageline.planning.searching.problem import Room
from stageline.scheduling import Costs, Simulation
from stageline.scheduling.costs import Number, number_text

PerRank: TypeAlias = Number | Sequence[Number] | None


@dataclass(frozen=True)
class Limits:
    """The limit of each rank.

    Attributes:
        per_rank: One number each; None for no limit.
        in_bytes: Whether they are bytes. Activations otherwise, those of one microbatch in a rank's
            share of the model: what ``Simulation.peak_activations`` counts.
    """

    per_rank: tuple[Number, ...] | None
    in_bytes: bool = False

    @classmethod
    def of(
        cls, num_ranks: int, costs: Costs, memory_limit: PerRank, memory_limit_bytes: PerRank
    ) -> Limits:
        """Take the limits as a user gives them.

        Raises:
            ScheduleError: They contradict each other, or are for other ranks.
        """
        if memory_limit is None and memory_limit_bytes is None:
            return cls(None)
        if memory_limit is not None and memory_limit_bytes is not None:
            raise ScheduleError(
                "memory_limit (in activations) and memory_limit_bytes are given: give one of them"
            )
        if memory_limit is not None:
            return cls(_per_rank("memory_limit", memory_limit, num_ranks))
        if costs.activation_bytes is None:
            raise ScheduleError(
                "memory_limit_bytes needs to know how large activations are: give the costs "
                "activation_bytes, or a memory_limit in activations"
            )
        return cls(_per_rank("memory_limit_bytes", memory_limit_bytes, num_ranks), in_bytes=True)

    def room(self, num_ranks: int, num_stages: int, costs: Costs) -> Room:
        """Return the limits for so many stages, and what each stage takes."""
        if self.in_bytes:
            return Room(
                self.per_rank or (),
                costs.of_stages("activation_bytes", num_stages),
                costs.of_stages("input_gradient_frees", num_stages),
            )
        limits: tuple[Number | None, ...] = (None,) * num_ranks
        if self.per_rank is not None:
            share = Fraction(num_stages, num_ranks)
            limits = tuple(int(limit * share) for limit in self.per_rank)
        return Room(limits, (1,) * num_stages, (0,) * num_stages)

    def fit(self, simulation: Simulation) -> bool:
        """Return whether every rank of a schedule holds no more than it may."""
        if self.per_rank is None:
            return True
        peaks = simulation.peak_bytes if self.in_bytes else simulation.peak_activations
        assert peaks is not None, "with a limit in bytes the costs say how large activations are"
        return all(peak <= limit for peak, limit in zip(peaks, self.per_rank, strict=True))

    def too_small(self, room: Room, placement: tuple[int, ...]) -> list[str]:
        """Return which ranks cannot hold even one microbatch on all their stages."""
        if self.per_rank is None:
            return []
        num_ranks = len(self.per_rank)
        unit = "bytes" if self.in_bytes else "activations"
        one: Number = 1 if self.in_bytes else Fraction(num_ranks, len(placement))
        faults = []
        for rank, limit in enumerate(self.per_rank):
            kept = (size for size, at in zip(room.kept, placement, strict=True) if at == rank)
            needed = sum(kept) * one
            if needed > limit:
                faults.append(
                    f"rank {rank} may hold {number_text(limit)} {unit}, one microbatch takes "
                    f"{number_text(needed)}"
                )
        return faults


def _per_rank(name: str, given: PerRank, num_ranks: int) -> tuple[Number, ...]:
    limits = tuple(given) if isinstance(given, Sequence) else (given,) * num_ranks
    if len(limits) != num_ranks:
        raise ScheduleError(
            f"{name} is given for {len(limits)} ranks, the pipeline has {num_ranks}: give one "
            f"number per rank, or one for all"
        )
    for rank, limit in enumerate(limits):
        if isinstance(limit, bool) or not isinstance(limit, int | float | Fraction) or limit < 0:
            raise ScheduleError(f"{name} of rank {rank} is {limit!r}: give a number, 0 or more")
    return tuple(limit for limit in limits if limit is not None)
