"""How a Pipe cuts a batch, as ``torch.chunk`` does, and joins outputs, as ``torch.cat`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stageline.compat.fairscale.nn.pipe.skip.carrying import SkipKey, Skips, carrying

Value = Tensor | tuple[Tensor, ...]


def check(value: Any, where: str = "") -> None:
    """Check that a value is a tensor or a tuple of tensors.

    Raises:
        TypeError: It is not.
    """
    for leaf in value if isinstance(value, tuple) else (value,):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"expected Tensor, but got {type(leaf).__name__}{where}")


def num_rows(value: Value) -> int:
    """Return the rows of a batch.

    Raises:
        IndexError: It is an empty tuple.
        RuntimeError: A tensor has no rows.
        ValueError: The tensors have different numbers of rows.
    """
    if isinstance(value, tuple) and not value:
        raise IndexError("the input is an empty tuple: wanted a tensor or a tuple of tensors")
    leaves = value if isinstance(value, tuple) else (value,)
    if any(leaf.dim() == 0 for leaf in leaves):
        raise RuntimeError("chunk expects at least a 1-dimensional tensor")
    rows = [len(leaf) for leaf in leaves]
    if len(set(rows)) > 1:
        raise ValueError(
            f"the tensors of the input have {', '.join(map(str, rows))} rows: all are cut into the "
            "same microbatches, so all need the same number"
        )
    return rows[0]


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """Return the rows of each microbatch; there may be fewer microbatches than chunks.

    Example:
        >>> chunk_sizes(7, 4), chunk_sizes(5, 4), chunk_sizes(2, 4)
        ([2, 2, 2, 1], [2, 2, 1], [1, 1])
    """
    return [len(piece) for piece in torch.empty(rows, 0).chunk(chunks)]


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Value:
    """Return the output of the batch.

    Example:
        >>> join([torch.zeros(2), torch.ones(1)], [2, 1])
        tensor([0., 0., 1.])
    """
    kinds = {len(output) if isinstance(output, tuple) else 0 for output in outputs}
    if len(kinds) > 1:
        raise ValueError(
            "the last partition returned tuples of different lengths, or a tensor here and a tuple "
            "there, for the microbatches of one batch: they cannot be joined"
        )
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs))
    return tuple(torch.cat(pieces) for pieces in zip(*outputs, strict=True))


class Stage(nn.Module):
    """Consecutive partitions as one stage of a pipeline: skip tensors travel beside the value.

    Args:
        partitions: The partitions by their number.
        arriving: The skip tensors that come from earlier stages.
        leaving: Those that later stages need.
    """

    draws_nothing = True  # no random numbers; its layers answer for themselves

    def __init__(
        self,
        partitions: dict[int, nn.Module],
        arriving: Sequence[SkipKey],
        leaving: Sequence[SkipKey],
    ) -> None:
        super().__init__()
        self.numbers = tuple(partitions)
        self.partitions = nn.ModuleList(partitions.values())
        self.arriving = tuple(arriving)
        self.leaving = tuple(leaving)

    def forward(self, value: Any) -> Any:
        skips: Skips = {}
        if self.arriving:
            value, tensors = value
            skips = dict(zip(self.arriving, tensors, strict=True))
        with carrying(skips):
            for number, partition in zip(self.numbers, self.partitions, strict=True):
                value = partition(value)
                check(value, f" from partition {number}: a Pipe passes tensors and tuples of them")
        if self.leaving:
            return value, tuple(skips[key] for key in self.leaving)
        return value
