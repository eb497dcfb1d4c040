"""The sizes of microbatches for which somebody wants to know costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from stageline.capturing.inputs import Arguments


def read_rows(rows: object, example: Arguments) -> tuple[list[int], list[str]]:
    """Return sizes of microbatches, and what is wrong with them.

    Args:
        rows: One size, several, or None for that of the example.
        example: What the model was captured with.
    """
    if example.rows is None:
        return [], ["graph: its example has no tensor with rows: capture it with a batch"]
    if rows is None:
        return [example.rows], []
    several = isinstance(rows, Sequence) and not isinstance(rows, str)
    sizes: list[Any] = list(rows) if several else [rows]  # type: ignore[call-overload]  # several
    if not sizes or not all(map(is_count, sizes)) or len(set(sizes)) < len(sizes):
        return [], [f"rows={rows!r}: wanted a size of microbatches, or different ones: [1, 4]"]
    return sizes, []


def is_count(value: object) -> TypeGuard[int]:
    """Whether something is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
