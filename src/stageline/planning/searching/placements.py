"""Which rank holds which stage: the ways that a search tries.

straight   consecutive stages on each rank          0 0 1 1     4 stages on 2 ranks
looped     round the ranks, again and again         0 1 0 1
v          down the ranks and up again              0 1 1 0
"""

from __future__ import annotations

from collections.abc import Sequence

from stageline.errors import ScheduleError
from stageline.scheduling.schedules.rows import contiguous

PLACEMENTS = ("straight", "looped", "v")
_NAME = "auto"


def placements_of(
    given: str | Sequence[int] | None, num_stages: int, num_ranks: int
) -> list[tuple[int, ...]]:
    """Return which placements to look at."""
    known = _known_placements(num_stages, num_ranks)
    if given is None:
        return list(dict.fromkeys(known.values()))
    if isinstance(given, str):
        if given in known:
            return [known[given]]
        if given in PLACEMENTS:
            raise ScheduleError(
                f"{_NAME}: {num_stages} stages on {num_ranks} ranks cannot be placed {given!r}: "
                f"choose one of {', '.join(known)}, or cut the model otherwise"
            )
        raise ScheduleError(
            f"{_NAME}: unknown placement {given!r}: choose one of {', '.join(PLACEMENTS)}, or give "
            f"the rank of every stage"
        )
    chosen = tuple(given)
    if len(chosen) != num_stages or set(chosen) != set(range(num_ranks)):
        raise ScheduleError(
            f"{_NAME}: placement {chosen}: give the rank of each of {num_stages} stages, and every "
            f"one of {num_ranks} ranks a stage"
        )
    return [chosen]


def _known_placements(num_stages: int, num_ranks: int) -> dict[str, tuple[int, ...]]:
    straight = [rank for rank, held in enumerate(contiguous(num_stages, num_ranks)) for _ in held]
    known = {"straight": tuple(straight)}
    if num_stages > num_ranks and num_stages % num_ranks == 0:
        known["looped"] = tuple(stage % num_ranks for stage in range(num_stages))
    if num_stages == 2 * num_ranks:
        known["v"] = (*range(num_ranks), *reversed(range(num_ranks)))
    return known
