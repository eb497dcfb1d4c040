"""Seeing each other's words: two processes write one word each, then read the other's.

    one      lays down a packet,  then looks whether the other sleeps
    other    says that it sleeps, then looks for a packet

A processor may read before others see what it wrote. Then both look too early, and one sleeps
beside a packet that nobody wakes it for. A fence between writing and reading prevents that, and
both need one. Laying down packets is what everybody waits for, going to sleep is not: where the
kernel has ``membarrier``, who goes to sleep gives all others their fence too, at that moment. That
takes longer than many fences, and is for ranks that seldom sleep.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from functools import lru_cache

# These processors let others see writes in the order in which they were made, and read in order.
KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")

_MEMBARRIER = 324  # the system call, on these processors
_FENCE_ALL, _TAKE_PART = 1 << 1, 1 << 2  # the "global expedited" commands: to fence, to be fenced

_barrier = threading.Lock()


def fence() -> None:
    """Let all writes before it be seen by other processes before any read after it is done.

    Taking a lock is the one such instruction that Python has. Nobody ever waits for this one.
    """
    if _barrier.acquire(blocking=False):
        _barrier.release()


def fence_others() -> None:
    """Do so in every process of this host that is ``fenced_by_others``, while it runs."""
    _membarrier(_FENCE_ALL)


def fenced_by_others() -> bool:
    """Let others fence this process, for good; return whether they can, so that it need not.

    Processes of one host nearly always have the same answer. Where only one is kept from the call,
    somebody may oversleep a packet until he next looks by himself.

    Example:
        >>> fenced_by_others() in (True, False)
        True
    """
    return _take_part(os.getpid())


@lru_cache(maxsize=1)
def _take_part(process: int) -> bool:
    """Do so once in a process; what was forked is another one."""
    if not KEEPS_ORDER or sys.platform != "linux":
        return False
    return _membarrier(_TAKE_PART) == 0


def _membarrier(command: int) -> int:
    done: int = ctypes.CDLL(None).syscall(_MEMBARRIER, command, 0, 0)
    return done
