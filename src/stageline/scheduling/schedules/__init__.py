"""The schedules that stageline ships, each a function of integers, one file per family.

    gpipe          all forwards, then all backwards
    1f1b           one forward, one backward: the same speed as GPipe, far less memory
    sequential     one microbatch at a time: no overlap, for debugging
    forward-only   inference and evaluation

To add a family, state its rule for a rank in a new file (``rows.py`` helps) and enter it below.
"""

from __future__ import annotations

import difflib
from typing import Protocol

from stageline.errors import ScheduleError
from stageline.scheduling.schedule import Schedule
from stageline.scheduling.schedules.forward_only import forward_only
from stageline.scheduling.schedules.gpipe import gpipe
from stageline.scheduling.schedules.one_f_one_b import one_f_one_b
from stageline.scheduling.schedules.sequential import sequential

__all__ = ["NAMES", "build", "forward_only", "gpipe", "one_f_one_b", "sequential"]


class _Family(Protocol):
    def __call__(
        self, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
    ) -> Schedule: ...


_FAMILIES: dict[str, _Family] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "sequential": sequential,
    "forward-only": forward_only,
}

NAMES = tuple(_FAMILIES)
"""The names that ``build`` knows."""


def build(
    name: str, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Return the schedule of that name.

    >>> build("1f1b", num_stages=4, num_microbatches=8) == one_f_one_b(4, 8)
    True

    Raises:
        ScheduleError: There is no such schedule, or the numbers make no pipeline.
    """
    family = _FAMILIES.get(name)
    if family is None:
        near = difflib.get_close_matches(name.lower(), NAMES, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ScheduleError(f"unknown schedule {name!r}: choose one of {', '.join(NAMES)}.{guess}")
    return family(num_stages, num_microbatches, num_ranks=num_ranks)
