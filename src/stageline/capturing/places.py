"""Where in the user's code something happened: the file and line that errors and guards name."""

from __future__ import annotations

import os
import sys
import traceback
from functools import lru_cache

import torch

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def where() -> str:
    """Return the innermost line outside torch and this library, ``model.py:12 in forward``."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            name = os.path.basename(frame.f_code.co_filename)
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return "an unknown line"


def line_of(error: BaseException) -> str:
    """Return the innermost line outside torch and this library that an error came through."""
    found = "an unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_users(frame.f_code.co_filename):
            name = os.path.basename(frame.f_code.co_filename)
            found = f"{name}:{line} in {frame.f_code.co_name}"
    return found


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    if file.startswith(("<frozen", "<string")) or "contextlib" in file or "functools" in file:
        return False
    return not file.startswith((_HERE, _TORCH))
