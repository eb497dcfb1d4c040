"""What the search looks at: times in whole ticks, what waits for what, and how much room there is.

Every stage has lines, one for each kind of action it runs: all its forwards, all its input
gradients, all its weight gradients, each in ascending order of the microbatches. To schedule is to
say, for each rank, from which of its lines the next action comes.

    stage 1   F0 F1 F2 ..   F j waits for F j of stage 0, and takes room
              I0 I1 I2 ..   I j waits for I j of stage 2, and for F j of its own stage
              W0 W1 W2 ..   W j waits for I j of its own stage, and gives the room back

A rank runs one action at a time, so what it holds depends on the order alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from stageline.scheduling import Costs, Kind
from stageline.scheduling.costs import Number
from stageline.scheduling.units import Unit

Metric: TypeAlias = Literal["T", "span"]
Tick: TypeAlias = int | float

SPLIT = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
"""The lines of a stage whose backward runs in two halves."""

WHOLE = (Kind.FORWARD, Kind.BACKWARD)
"""The lines of a stage whose backward is one action."""


@dataclass(frozen=True)
class Room:
    """How much each rank may hold, and what each stage takes of it; in any unit.

    Attributes:
        limits: Of each rank; None for no limit.
        kept: What each stage keeps of a microbatch from F on.
        freed: The part of it that I releases; W releases the rest.
    """

    limits: tuple[Number | None, ...]
    kept: tuple[Number, ...]
    freed: tuple[Number, ...]


@dataclass(frozen=True)
class Problem:
    """A pipeline to be scheduled.

    Attributes:
        num_microbatches: Slices of the batch.
        placement: The rank of each stage.
        kinds: The lines of a stage, in the order in which a microbatch passes them.
        duration: By line and stage, in ticks.
        hops: How long a value takes over each cut: forward, backward; nothing within a rank.
        changes: By line and stage, what an action adds to what its rank holds when it runs.
        limits: What each rank may hold; None for no limit.
        unit: What a tick is worth.
    """

    num_microbatches: int
    placement: tuple[int, ...]
    kinds: tuple[Kind, ...]
    duration: tuple[tuple[Tick, ...], ...]
    hops: tuple[tuple[Tick, Tick], ...]
    changes: tuple[tuple[Tick, ...], ...]
    limits: tuple[Tick | None, ...]
    unit: Unit

    @classmethod
    def of(
        cls,
        placement: tuple[int, ...],
        num_microbatches: int,
        costs: Costs,
        room: Room,
        kinds: tuple[Kind, ...] = SPLIT,
    ) -> Problem:
        """State a problem for costs.

        Raises:
            ScheduleError: The costs are for another number of stages or cuts.
        """
        num_stages = len(placement)
        times = [costs.per_stage(kind, num_stages) for kind in kinds]
        hops = [_hop(costs, cut, placement) for cut in range(num_stages - 1)]
        unit = Unit.of(
            [*(time for row in times for time in row), *(t for pair in hops for t in pair)]
        )
        sizes = [size for size in (*room.limits, *room.kept, *room.freed) if size is not None]
        weigh = Unit.of(sizes).ticks
        kept, freed = [weigh(size) for size in room.kept], [weigh(size) for size in room.freed]
        ends = [-size for size in kept]
        middle = [-size for size in freed]
        rest = [inner - whole for inner, whole in zip(freed, kept, strict=True)]
        changes = (kept, middle, rest) if len(kinds) == len(SPLIT) else (kept, ends)
        return cls(
            num_microbatches=num_microbatches,
            placement=placement,
            kinds=kinds,
            duration=tuple(tuple(map(unit.ticks, row)) for row in times),
            hops=tuple((unit.ticks(there), unit.ticks(back)) for there, back in hops),
            changes=tuple(map(tuple, changes)),
            limits=tuple(None if limit is None else weigh(limit) for limit in room.limits),
            unit=unit,
        )

    @property
    def num_stages(self) -> int:
        """How many pieces the model is cut into."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """How many workers there are."""
        return len(self.limits)

    @property
    def num_actions(self) -> int:
        """How many actions all ranks run together."""
        return len(self.kinds) * self.num_stages * self.num_microbatches

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, ascending."""
        return [stage for stage, at in enumerate(self.placement) if at == rank]

    def heads(self) -> list[Tick]:
        """Return when each rank begins: the first forward has come through the stages before.

        No order can change that: all else that a rank does comes after its first forward.
        """
        heads: list[Tick] = [0] * self.num_ranks
        begun = [False] * self.num_ranks
        time: Tick = 0
        for stage, rank in enumerate(self.placement):
            if not begun[rank]:
                heads[rank], begun[rank] = time, True
            time += self.duration[0][stage]
            if stage < self.num_stages - 1:
                time += self.hops[stage][0]
        return heads

    def offsets(self, metric: Metric) -> list[Tick]:
        """Return what to add to the end of each rank: the largest sum is the figure to be small."""
        return [-head for head in self.heads()] if metric == "span" else [0] * self.num_ranks


def _hop(costs: Costs, cut: int, placement: tuple[int, ...]) -> tuple[Number, Number]:
    """Return how long a value takes over a cut, forward and backward."""
    here, there = placement[cut], placement[cut + 1]
    if here == there:
        return 0, 0
    num_cuts = len(placement) - 1
    return costs.hop(cut, num_cuts, here, there), costs.hop(cut, num_cuts, there, here)
