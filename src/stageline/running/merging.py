"""The outputs of the microbatches, leaf by leaf, become those of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stageline import torch_private as trees
from stageline.running.microbatches import BatchDims
from stageline.running.sizes import refuse_unknown

MergeOutputs = Callable[[Sequence[Any], Sequence[int]], Any]
"""``(outputs of the microbatches, their rows) -> the output of the batch``."""


class PerMicrobatch(list[Any]):
    """Outputs without a batch dimension to join along: one entry per microbatch."""


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], batch_dims: BatchDims = 0) -> Any:
    """Join the outputs of the microbatches, leaf by leaf, to those of the whole batch.

    A tensor whose batch dimension has the size of its microbatch is concatenated; equal plain
    values stay one value; everything else comes back as :class:`PerMicrobatch`.

    Example:
        >>> merge_outputs([{"y": torch.zeros(2), "n": 1}, {"y": torch.ones(1), "n": 1}], [2, 1])
        {'y': tensor([0., 0., 1.]), 'n': 1}
    """
    flat = [trees.tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        return PerMicrobatch(outputs)
    names: Sequence[str] = []
    if not isinstance(batch_dims, int):
        names = trees.leaf_names(outputs[0], root="output")
        refuse_unknown([n for n in batch_dims if n.startswith("output")], names, "output")
    merged = [
        _merge_leaf(leaves, sizes, _output_dim(batch_dims, names, index))
        for index, leaves in enumerate(zip(*(leaves for leaves, _ in flat), strict=True))
    ]
    return trees.tree_unflatten(merged, spec)


def _output_dim(batch_dims: BatchDims, names: Sequence[str], index: int) -> int | None:
    return batch_dims if isinstance(batch_dims, int) else batch_dims.get(names[index], 0)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal; what is not plain might not even answer."""
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other


def _merge_leaf(leaves: tuple[Any, ...], sizes: Sequence[int], dim: int | None) -> Any:
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        same = all(_is_same(leaf, leaves[0]) for leaf in leaves)
        return leaves[0] if same else PerMicrobatch(leaves)
    if dim is not None and all(
        isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == size
        for leaf, size in zip(leaves, sizes, strict=True)
    ):
        if len(leaves) == 1:
            return leaves[0]
        # Rows against rows, as in a contrastive loss, have no common shape.
        if len({_other_sizes(leaf, dim) for leaf in leaves}) == 1:
            return torch.cat(leaves, dim)
    return PerMicrobatch(leaves)


def _other_sizes(leaf: Tensor, dim: int) -> tuple[int, ...]:
    dim %= leaf.dim()
    return (*leaf.shape[:dim], *leaf.shape[dim + 1 :])


class MergedOutputs:
    """The outputs of the microbatches as those of the batch; merged once, when first asked for."""

    def __init__(self, parts: Sequence[Any], sizes: Sequence[int], merge: MergeOutputs) -> None:
        self._parts: Sequence[Any] | None = parts
        self._sizes = sizes
        self._merge = merge
        self._value: Any = None

    def __call__(self) -> Any:
        if self._parts is not None:
            self._value = self._merge(self._parts, self._sizes)
            self._parts = None
        return self._value
