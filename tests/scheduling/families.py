"""The built-in families, in sizes that each of them takes."""

from __future__ import annotations

from collections.abc import Iterator

from stageline.scheduling import Schedule, schedules

RUNNABLE = [name for name in schedules.NAMES if schedules.family(name).replicas == 1]
TWO_COPIES = [name for name in schedules.NAMES if schedules.family(name).replicas == 2]


def example(name: str, *, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return a schedule of the family, for any number of microbatches."""
    num_stages = schedules.family(name).num_stages(num_ranks)
    return schedules.fitted(name, num_stages, num_microbatches, num_ranks=num_ranks)


def stages_and_ranks(name: str, most: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of stages and ranks that the family takes, small ones."""
    family = schedules.family(name)
    for ranks in range(1, most + 1):
        if family.replicas == 2 and ranks % 2:
            continue
        for each in {"consecutive": (1, 2), "looped": (1, 2, 3)}.get(family.placement, ()):
            yield each * ranks, ranks
        if family.placement == "consecutive":
            yield 2 * ranks + 1, ranks
        elif family.placement != "looped":
            yield family.stages_per_rank * ranks, ranks


def sizes(name: str, most_ranks: int, most_microbatches: int) -> Iterator[tuple[int, int, int]]:
    """Yield stages, ranks and microbatches that the family takes."""
    round_up = schedules.family(name).round_up
    for stages, ranks in stages_and_ranks(name, most_ranks):
        for microbatches in sorted({round_up(ranks, m) for m in range(1, most_microbatches + 1)}):
            yield stages, ranks, microbatches
