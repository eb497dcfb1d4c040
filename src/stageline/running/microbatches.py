"""The microbatch contract: how a batch is split, and outputs are merged.

    batch of n = 10 rows, num_microbatches = 4        ->  rows 3 3 2 2   (as torch.tensor_split
    cuts) batch of n = 2 rows,  num_microbatches = 4        ->  rows 1 1       (never an empty
    microbatch)

A leaf whose batch dimension (0, unless ``batch_dims`` says otherwise) has the size of the batch is
split; plain Python values, 0-dimensional tensors and leaves under ``sl.replicate`` go whole to
every microbatch. Two leaves that disagree about the size of the batch are an error that names
them: guessing which one is meant would be silently wrong for somebody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.errors import BatchError
from stageline.running import torch_private as trees

BatchDims = int | Mapping[str, int | None]


@dataclass(frozen=True)
class Replicated:
    """A value that every microbatch gets whole; made by :func:`replicate`."""

    value: Any


def replicate(value: Any) -> Any:
    """Mark an argument that every microbatch gets whole, although it looks like a batch.

    Example:
        >>> positions = torch.arange(16).view(1, 16)
        >>> marked = replicate(positions)  # pipe.step(tokens, positions=marked, target=labels)
        >>> marked.value is positions
        True
    """
    return value if isinstance(value, Replicated) else Replicated(value)


class PerMicrobatch(list[Any]):
    """Outputs without a batch dimension to join along: one entry per microbatch."""


@dataclass(frozen=True)
class Batch:
    """What one call was given: the whole batch, or one microbatch of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    rows: int


LossWeight = Callable[[Batch, Batch], float | Tensor]
LossReduction = str | LossWeight


class Microbatches:
    """A batch cut into microbatches; a slice is made when somebody asks for it."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        *,
        num_microbatches: int,
        batch_dims: BatchDims = 0,
        rows: int | None = None,
    ) -> None:
        self._args = _Sliceable(args, "args", batch_dims)
        self._kwargs = _Sliceable(kwargs, "kwargs", batch_dims)
        self._target = _Sliceable(target, "target", batch_dims)
        self._check_names(batch_dims)
        self.rows = self._agreed_rows(rows)
        self.count = min(num_microbatches, self.rows)
        self.sizes = split_sizes(self.rows, self.count)
        self._starts = [sum(self.sizes[:index]) for index in range(self.count)]

    @property
    def _trees(self) -> tuple[_Sliceable, _Sliceable, _Sliceable]:
        return self._args, self._kwargs, self._target

    def _check_names(self, batch_dims: BatchDims) -> None:
        if isinstance(batch_dims, int):
            return
        names = [name for tree in self._trees for name in tree.names]
        unknown = [name for name in batch_dims if name not in names and not _is_output(name)]
        if unknown:
            raise BatchError(
                f"batch_dims names {', '.join(map(repr, unknown))}, but the leaves of this "
                "batch are "
                f"{', '.join(names)}"
            )

    def _agreed_rows(self, rows: int | None) -> int:
        """Return the one batch size that all split leaves have, or say which two disagree."""
        said_by = "the rank that holds stage 0"
        for tree in self._trees:
            for index, dim, size in tree.sizes():
                if rows is None:
                    rows, said_by = size, tree.names[index]
                elif size != rows:
                    raise BatchError(_disagreement(tree, index, dim, f"{said_by} says", rows))
        if rows is None:
            given = [type(leaf).__name__ for tree in self._trees for leaf in tree.leaves]
            raise BatchError(
                "no argument has a batch dimension: wanted at least one tensor of one or more "
                f"dimensions, got {', '.join(given)}. Pass the batch as tensors"
            )
        if rows == 0:
            raise BatchError(f"{said_by} says the batch has 0 rows: skip empty batches")
        return rows

    @property
    def whole(self) -> Batch:
        """The batch as it was given, ``sl.replicate`` marks removed."""
        args, kwargs, target = (tree.whole() for tree in self._trees)
        return Batch(args, kwargs, target, self.rows)

    def part(self, index: int) -> Batch:
        """Return one microbatch."""
        args, kwargs = self.inputs(index)
        return Batch(args, kwargs, self.target(index), self.sizes[index])

    def inputs(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model for one microbatch."""
        start, length = self._starts[index], self.sizes[index]
        return self._args.slice(start, length), self._kwargs.slice(start, length)

    def target(self, index: int) -> Any:
        """Return the target of one microbatch."""
        return self._target.slice(self._starts[index], self.sizes[index])


def _disagreement(tree: _Sliceable, index: int, dim: int, says: str, rows: int) -> str:
    name, shape = tree.names[index], tuple(tree.leaves[index].shape)
    return (
        f"{name} has {shape[dim]} rows in dimension {dim} (shape {shape}), but {says} the batch "
        "has "
        f"{rows}. Wrap it in sl.replicate(...) if every microbatch needs it whole, or name its "
        "batch "
        f"dimension: batch_dims={{{name!r}: ...}}"
    )


class _Sliceable:
    """One tree of a batch; ``dims``: where each leaf is split, None if it goes whole."""

    def __init__(self, tree: Any, root: str, batch_dims: BatchDims) -> None:
        self._tree = tree
        self._root = root
        leaves, self._spec = trees.tree_flatten(tree)
        self.dims = [self._batch_dim(leaf, index, batch_dims) for index, leaf in enumerate(leaves)]
        self.leaves = [leaf.value if isinstance(leaf, Replicated) else leaf for leaf in leaves]

    @cached_property
    def names(self) -> list[str]:
        """Names of the leaves, as messages and ``batch_dims`` use them: ``kwargs['mask']``."""
        return trees.leaf_names(self._tree, root=self._root)

    def _batch_dim(self, leaf: Any, index: int, batch_dims: BatchDims) -> int | None:
        if isinstance(leaf, np.ndarray):
            raise BatchError(f"{self.names[index]} is a numpy array: pass torch.from_numpy(...)")
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return None
        if isinstance(batch_dims, int):
            dim: int | None = batch_dims
        else:
            dim = batch_dims.get(self.names[index], 0)
        if dim is None:
            return None
        if not -leaf.dim() <= dim < leaf.dim():
            raise BatchError(
                f"{self.names[index]} has shape {tuple(leaf.shape)}, so it has no dimension "
                f"{dim} to "
                "be split along: correct batch_dims or wrap it in sl.replicate(...)"
            )
        return dim % leaf.dim()

    def sizes(self) -> list[tuple[int, int, int]]:
        """Return (leaf, dimension, size) for every leaf that is split."""
        return [
            (index, dim, leaf.shape[dim])
            for index, (leaf, dim) in enumerate(zip(self.leaves, self.dims, strict=True))
            if dim is not None
        ]

    def whole(self) -> Any:
        return trees.tree_unflatten(self.leaves, self._spec)

    def slice(self, start: int, length: int) -> Any:
        if not self.leaves:
            return self._tree
        # narrow, not split: a view with several siblings may not be changed in place.
        leaves = [
            leaf if dim is None else leaf.narrow(dim, start, length)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return trees.tree_unflatten(leaves, self._spec)


def split_sizes(rows: int, count: int) -> list[int]:
    """Return the sizes of the parts that ``torch.tensor_split`` makes.

    Example:
        >>> split_sizes(10, 4)
        [3, 3, 2, 2]
    """
    small, larger = divmod(rows, count)
    return [small + 1] * larger + [small] * (count - larger)


def _is_output(name: str) -> bool:
    return name == "output" or name.startswith(("output[", "output."))


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
    names: Sequence[str] = (
        [] if isinstance(batch_dims, int) else trees.leaf_names(outputs[0], root="output")
    )
    merged = [
        _merge_leaf(leaves, sizes, _output_dim(batch_dims, names, index))
        for index, leaves in enumerate(zip(*(leaves for leaves, _ in flat), strict=True))
    ]
    return trees.tree_unflatten(merged, spec)


def _output_dim(batch_dims: BatchDims, names: Sequence[str], index: int) -> int | None:
    return batch_dims if isinstance(batch_dims, int) else batch_dims.get(names[index], 0)


def _merge_leaf(leaves: tuple[Any, ...], sizes: Sequence[int], dim: int | None) -> Any:
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        same = all(type(leaf) is type(leaves[0]) and leaf == leaves[0] for leaf in leaves)
        return leaves[0] if same else PerMicrobatch(leaves)
    if dim is not None and all(
        isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == size
        for leaf, size in zip(leaves, sizes, strict=True)
    ):
        return leaves[0] if len(leaves) == 1 else torch.cat(leaves, dim)
    return PerMicrobatch(leaves)
