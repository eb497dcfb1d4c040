"""What a rank has, and what it runs: the terms on which stages are weighed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stageline.errors import ScheduleError
from stageline.partitioning.blocks import Blocks
from stageline.partitioning.device import Device, Link
from stageline.partitioning.holdings import Holding, holdings_of, holdings_of_1f1b
from stageline.scheduling import Kind, Schedule, schedules
from stageline.scheduling.memory import peak_bytes
from stageline.scheduling.recompute import Recompute, insert_recompute
from stageline.scheduling.schedules.rows import contiguous

# As many as a pipeline makes unless told otherwise.
_MICROBATCHES_PER_RANK = 4

# What crosses a cut is sent forward, and its gradient back; sender and receiver are both busy.
TRIPS = 2

NOMINAL = Link(latency=0.0, bandwidth=10e9)


@dataclass(frozen=True)
class Budget:
    """The memory of a rank, and the schedule that fills it.

    Attributes:
        limit: Bytes; None for as much as it takes.
        num_ranks: How many ranks share the stages; None for one per stage, or what the schedule
            makes of them.
        schedule: A schedule, or the name of one; None for 1F1B with microbatches enough.
        num_microbatches: For a schedule that is named; 4 per rank if None.
        device: What ranks run on; None for a nominal link between them.
        recompute: What is recomputed, besides what the schedule recomputes by itself.
    """

    limit: int | None = None
    num_ranks: int | None = None
    schedule: str | Schedule | None = None
    num_microbatches: int | None = None
    device: Device | None = None
    recompute: Recompute = "never"
    # What was built or counted for a number of stages: a large schedule takes its time.
    _built: dict[int, Schedule] = field(default_factory=dict, init=False, compare=False, repr=False)
    _held: dict[int, list[tuple[Holding, ...]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def built(self, num_stages: int) -> Schedule | None:
        """Return the schedule for so many stages; None if there is none in particular.

        Raises:
            ScheduleError: It cannot be built for so many.
        """
        given = self.schedule
        if given is None:
            return None
        if num_stages not in self._built:
            if isinstance(given, str):
                ranks = self.num_ranks or schedules.family(given).num_ranks(num_stages)
                count = self.num_microbatches or _MICROBATCHES_PER_RANK * ranks
                given = schedules.build(given, num_stages, count, num_ranks=self.num_ranks)
            self._built[num_stages] = insert_recompute(given, self.recompute)
        return self._built[num_stages]

    def faults(self, num_stages: int) -> list[str]:
        """Return why this cannot be for so many stages."""
        given, ranks = self.schedule, self.num_ranks
        if ranks is not None and ranks > num_stages:
            return [f"ranks={ranks}: there are only {num_stages} stages: use as many ranks"]
        if isinstance(given, Schedule) and given.num_stages != num_stages:
            return [f"schedule: it is for {given.num_stages} stages, the split makes {num_stages}"]
        if isinstance(given, Schedule) and ranks not in (None, given.num_ranks):
            return [f"schedule: it is for {given.num_ranks} ranks, ranks={ranks}"]
        try:
            self.built(num_stages)
        except ScheduleError as error:
            return [f"schedule: {error}"]
        return []

    def placement(self, num_stages: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        schedule = self.built(num_stages)
        if schedule is not None:
            return schedule.placement
        ranks = contiguous(num_stages, self.num_ranks or num_stages)
        return tuple(rank for rank, stages in enumerate(ranks) for _ in stages)

    def kinds(self, num_stages: int) -> frozenset[Kind]:
        """Return what is run."""
        schedule = self.built(num_stages)
        return frozenset() if schedule is None else schedule.kinds()

    def holdings(self, num_stages: int) -> list[tuple[Holding, ...]]:
        """Return what each stage holds at most."""
        if num_stages not in self._held:
            schedule = self.built(num_stages)
            found = holdings_of_1f1b(num_stages) if schedule is None else holdings_of(schedule)
            self._held[num_stages] = found
        return self._held[num_stages]

    def for_stage(self, num_stages: int) -> int | None:
        """Return what each stage may have where a rank holds several: an equal share.

        Example:
            >>> Budget(limit=100, num_ranks=2).for_stage(num_stages=5)
            33
        """
        if self.limit is None:
            return None
        return self.limit // max(Counter(self.placement(num_stages)).values())

    def link(self, source: int, destination: int) -> Link | None:
        """Return what two ranks are connected by; None if they are one."""
        if source == destination:
            return None
        return NOMINAL if self.device is None else self.device.between(source, destination)

    def rank_memory(self, blocks: Blocks, sizes: list[int]) -> list[int]:
        """Return the bytes that each rank needs at most, all its stages together."""
        placement = self.placement(len(sizes))
        needed = [0] * (max(placement) + 1)
        schedule = self.built(len(sizes))
        if schedule is None:
            stages = blocks.needed(sizes, self.holdings(len(sizes)))
        else:
            stages = blocks.needed(sizes, [(Holding(0),)] * len(sizes))
            peaks = peak_bytes(schedule, blocks.held(sizes))
            assert peaks is not None  # sizes are given
            needed = [int(peak) for peak in peaks]
        for rank, stage in zip(placement, stages, strict=True):
            needed[rank] += stage
        return needed


def transfer_time(link: Link | None, num_bytes: int) -> int:
    """Return the nanoseconds that a cut costs each of the two stages on its sides.

    Example:
        >>> transfer_time(NOMINAL, 1000), transfer_time(None, 1000)
        (200, 0)
    """
    return 0 if link is None else TRIPS * (link.time(num_bytes) + link.handled)
