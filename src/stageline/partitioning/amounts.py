"""Amounts of memory, read and written: ``16GiB``."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power


def read_bytes(text: object) -> int | None:
    """Return a number of bytes, given as such or as text; None if it is none.

    Example:
        >>> read_bytes("1.5 KiB"), read_bytes("2GB"), read_bytes(512), read_bytes("much")
        (1536, 2000000000, 512, None)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text if text > 0 else None
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
        if isinstance(text, str)
        else None
    )
    if match is None or match[2].upper() not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2].upper()]) or None


def show_bytes(count: int, *, at_least: bool = False) -> str:
    """Return a number of bytes for people.

    Example:
        >>> show_bytes(512), show_bytes(8500), show_bytes(3 * 2**30)
        ('512 B', '8.3 KiB', '3.0 GiB')

    Args:
        count: How many.
        at_least: Whether what is shown must not be less, for limits that somebody will type.
    """
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    tenths = count * 10 / 1024**power
    shown = math.ceil(tenths) / 10 if at_least else tenths / 10
    return f"{shown:.1f} {'KMGT'[power - 1]}iB"
