"""Which microbatch a stage runs right now, for code inside of the stage."""

from __future__ import annotations

import threading


class _Current(threading.local):
    microbatch: int | None = None


CURRENT = _Current()
"""Set around every run of a stage, in the thread of its rank."""


def current_microbatch() -> int | None:
    """Return the number of the microbatch that the caller's stage runs; None outside of a stage.

    A recomputed forward has the number of the first one.

    Example:
        >>> current_microbatch() is None
        True
    """
    return CURRENT.microbatch
