"""How many rows each microbatch gets, and whether names of its leaves are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stageline.errors import BatchError

MicrobatchSizes = Callable[[int, int], Sequence[int]]
"""``(rows of the batch, num_microbatches) -> the rows of each microbatch``."""


def split_sizes(rows: int, count: int) -> list[int]:
    """Return the sizes of the parts that ``torch.tensor_split`` makes.

    Example:
        >>> split_sizes(10, 4)
        [3, 3, 2, 2]
    """
    small, larger = divmod(rows, count)
    return [small + 1] * larger + [small] * (count - larger)


def checked_sizes(sizes: MicrobatchSizes, rows: int, num_microbatches: int) -> list[int]:
    """Return what the user's own rule says, if it is a way to cut the batch."""
    found = list(sizes(rows, num_microbatches))
    fits = len(found) <= num_microbatches and sum(found) == rows
    if fits and all(isinstance(each, int) and each > 0 for each in found):
        return found
    raise BatchError(
        f"microbatch_sizes({rows}, {num_microbatches}) returned {found}: wanted at most "
        f"{num_microbatches} whole numbers above 0 whose sum is {rows}"
    )


def refuse_unknown(wanted: Sequence[str], names: Sequence[str], what: str) -> None:
    """Raise for entries of ``batch_dims`` that name no leaf."""
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise BatchError(
            f"batch_dims names {', '.join(map(repr, unknown))}, but the leaves of this {what} are "
            f"{', '.join(names)}"
        )
