"""Which sizes make a pipeline: checked before any row is written.

A family that cannot be built for some numbers says which it needs, which it got, and the nearest
that work.
"""

from __future__ import annotations

from stageline.errors import ScheduleError
from stageline.scheduling.action import LARGEST


def check_sizes(name: str, **sizes: int | None) -> None:
    """Raise unless every size that is given is a whole number of at least 1."""
    for what, size in sizes.items():
        if size is not None and (not isinstance(size, int) or not 1 <= size <= LARGEST):
            raise ScheduleError(f"{name} needs {what} of at least 1, got {what}={size!r}")


def straight_ranks(name: str, *, num_stages: int, num_ranks: int | None) -> int:
    """Return how many ranks a pipeline has that holds consecutive stages on each."""
    check_sizes(name, num_stages=num_stages, num_ranks=num_ranks)
    ranks = num_stages if num_ranks is None else num_ranks
    if ranks > num_stages:
        raise ScheduleError(
            f"{name} needs a stage for every rank, got num_stages={num_stages} for "
            f"num_ranks={ranks}: cut the model into more stages or use fewer ranks"
        )
    return ranks


def ranks_with(name: str, stages_per_rank: int, *, num_stages: int, num_ranks: int | None) -> int:
    """Return how many ranks a pipeline has whose ranks all hold so many stages.

    >>> ranks_with("zb-v", 2, num_stages=8, num_ranks=None)
    4
    """
    check_sizes(name, num_stages=num_stages, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    ranks = num_stages // stages_per_rank if num_ranks is None else num_ranks
    if ranks * stages_per_rank == num_stages:
        return ranks
    held = "one stage" if stages_per_rank == 1 else f"{stages_per_rank} stages"
    if num_ranks is None:
        got, way_out = "", nearest("num_stages", num_stages, stages_per_rank)
    else:
        got, way_out = f" for num_ranks={ranks}", f"use num_stages={ranks * stages_per_rank}"
        if num_stages % stages_per_rank == 0:
            way_out += f" or num_ranks={num_stages // stages_per_rank}"
    raise ScheduleError(
        f"{name} needs {held} for every rank, got num_stages={num_stages}{got}: {way_out}"
    )


def looped_ranks(
    name: str, *, num_stages: int, num_ranks: int | None, stages_per_rank: int | None
) -> tuple[int, int]:
    """Return ranks and stages per rank, from whichever of the two was given; 2 stages if neither.

    >>> looped_ranks("interleaved", num_stages=12, num_ranks=4, stages_per_rank=None)
    (4, 3)
    """
    check_sizes(name, num_stages=num_stages, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    if stages_per_rank is None and num_ranks is not None:
        if num_stages % num_ranks:
            raise ScheduleError(
                f"{name} needs equally many stages for every rank, got num_stages={num_stages} "
                f"for num_ranks={num_ranks}: {nearest('num_stages', num_stages, num_ranks)}"
            )
        return num_ranks, num_stages // num_ranks
    each = stages_per_rank or 2
    return ranks_with(name, each, num_stages=num_stages, num_ranks=num_ranks), each


def check_even_ranks(name: str, num_ranks: int) -> None:
    """Raise unless the ranks can be halved, for pipelines that run in both directions."""
    if num_ranks % 2:
        raise ScheduleError(
            f"{name} needs an even number of ranks, got num_ranks={num_ranks}: "
            f"{nearest('num_ranks', num_ranks, 2)}"
        )


def check_microbatches(
    name: str, num_microbatches: int, *, least: int = 1, multiple: int = 1, why: str
) -> None:
    """Raise unless a family has as many microbatches as its rule needs.

    Args:
        name: The family.
        num_microbatches: What was given.
        least: How many it needs.
        multiple: And of what they must be a multiple; ``least`` is one.
        why: The reason, for people.
    """
    check_sizes(name, num_microbatches=num_microbatches)
    if num_microbatches >= least and num_microbatches % multiple == 0:
        return
    wanted = [f"at least {least} microbatches"] if least > multiple else []
    if multiple > 1:
        many = "an even number" if multiple == 2 else f"a multiple of {multiple}"
        wanted.append(many if wanted else f"{many} microbatches")
    if num_microbatches < least:
        way_out = f"use num_microbatches={least}"
    else:
        way_out = nearest("num_microbatches", num_microbatches, multiple)
    raise ScheduleError(
        f"{name} needs {' and '.join(wanted)}, got num_microbatches={num_microbatches} "
        f"({why}): {way_out}"
    )


def nearest(what: str, size: int, multiple: int) -> str:
    """Say which multiples lie nearest.

    >>> nearest("num_microbatches", 9, 4)
    'use num_microbatches=8 or 12'
    """
    below = size // multiple * multiple
    return f"use {what}={f'{below} or ' if below else ''}{below + multiple}"
