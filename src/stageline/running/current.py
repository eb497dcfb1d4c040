"""Which microbatch a stage runs right now, for code inside of the stage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Current(threading.local):
    microbatch: int | None = None


CURRENT = _Current()
"""Set for every action, in the thread of its rank: for backwards as well as for forwards."""


@contextmanager
def number_restored() -> Iterator[None]:
    """Put the caller's number back in the end: None, or its own if a stage runs a pipeline."""
    outer = CURRENT.microbatch
    try:
        yield
    finally:
        CURRENT.microbatch = outer


def current_microbatch() -> int | None:
    """Return the number of the microbatch that the caller's stage runs; None outside of a stage.

    A recomputed forward has the number of the first one, and so has the backward, where code of the
    caller's runs in it.

    Example:
        >>> current_microbatch() is None
        True
    """
    return CURRENT.microbatch
