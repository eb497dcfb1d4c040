"""Sharing the cores: ranks on the CPU of one host divide the intra-op threads among themselves.

Two ranks on two cores with two threads each lose to one thread each (144 ms against 123 in a
trial).

torch keeps the number of threads per thread, and each thread reads the process-wide value the
first time it asks. So a worker asks first and sets then, and the caller sets its own value again
at the end: whatever thread comes later finds what the user had chosen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

_MANY_LOOKS, _FEW_LOOKS = 8000, 5
_SHARED = 1e-4  # seconds: giving the core away takes less than a microsecond if nobody wants it


def share_of_threads(num_ranks: int) -> int:
    """Return how many intra-op threads each of several ranks in this process gets."""
    return max(1, torch.get_num_threads() // num_ranks)


def share_of_cores() -> int:
    """Return how many intra-op threads this process gets next to the others on its host."""
    return min(torch.get_num_threads(), cores_for_each())


def cores_for_each() -> int:
    """Return how many cores there are for each process that was started on this host."""
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, _num_cores() // neighbours)


def looks_before_sleep(num_ranks: int) -> int:
    """Return how often one of several ranks on this host looks for a packet before it sleeps.

    A look takes half a microsecond, waking up fifty, and after a sleep what runs next is some
    percent slower. With a core for each rank, looking for a few milliseconds made tiny steps a
    fifth faster, convolutions and matrices of some milliseconds 2 to 3 % faster, and large ones no
    slower. Who shares a core gives it away at once; see ``looking`` too.
    """
    return _MANY_LOOKS if has_own_core(num_ranks) else _FEW_LOOKS


def has_own_core(num_ranks: int) -> bool:
    """Whether there is a core for each of several ranks on this host."""
    return num_ranks <= _num_cores()


def looking(most: int) -> Iterator[bool]:
    """Yield True for every look, so many at most, and end when somebody else wants the core.

    Example:
        >>> len(list(looking(3))) <= 3
        True
    """
    before = time.perf_counter()
    for _ in range(most):
        os.sched_yield()
        yield True
        now = time.perf_counter()
        if now - before > _SHARED:  # another process has run here in the meantime
            return
        before = now


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(count: int) -> int:
    """Set the number of intra-op threads of the current thread; return what it was."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    return before
