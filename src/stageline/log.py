"""The one logger of the library: rank in front, level by the environment.

``STAGELINE_LOG=debug python train.py`` shows everything; by default only warnings are shown.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LEVEL_VARIABLE = "STAGELINE_LOG"
LEVELS = ("debug", "info", "warning", "error")

_logger = logging.getLogger("stageline")


def configure() -> None:
    """Set the level that the environment asks for; a wrong one is reported, not raised."""
    wanted = os.environ.get(LEVEL_VARIABLE, "").lower()
    if not wanted:
        return
    if wanted not in LEVELS:
        _logger.warning(
            "%s=%s is no level: use one of %s", LEVEL_VARIABLE, wanted, ", ".join(LEVELS)
        )
        return
    _logger.setLevel(wanted.upper())
    if not _logger.handlers:
        _logger.propagate = False  # or a handler of the user's would show every line again
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("stageline %(levelname)s: %(message)s"))
        _logger.addHandler(handler)


def debug(rank: int, message: str) -> None:
    """Log a line that only someone who looks for a fault wants to read."""
    _logger.debug("rank %d: %s", rank, message)


def warning(rank: int, message: str) -> None:
    """Log a line that the user should see."""
    _logger.warning("rank %d: %s", rank, message)


@contextmanager
def warning_after(seconds: float, rank: int, message: str) -> Iterator[None]:
    """Log a line if what is done here takes long."""
    timer = threading.Timer(seconds, warning, (rank, message))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
