"""Which microbatch a stage runs right now, for code inside of the stage."""

from __future__ import annotations

import threading


class _Current(threading.local):
    microbatch: int | None = None


CURRENT = _Current()
"""Set for every action, in the thread of its rank: for backwards as well as for forwards."""


def current_microbatch() -> int | None:
    """Return the number of the microbatch that the caller's stage runs; None outside of a stage.

    A recomputed forward has the number of the first one, and so has the backward, where code of the
    caller's runs in it.

    Example:
        >>> current_microbatch() is None
        True
    """
    return CURRENT.microbatch
