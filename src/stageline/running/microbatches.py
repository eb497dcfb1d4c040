"""The microbatch contract: how a batch is split; merging.py makes the outputs one again.

    batch of 10 rows, num_microbatches = 4   ->  rows 3 3 2 2   (as torch.tensor_split cuts)
    batch of  2 rows, num_microbatches = 4   ->  rows 1 1       (never an empty microbatch)

A leaf whose batch dimension (0, unless ``batch_dims`` says otherwise) has the size of the batch is
split; plain Python values, 0-dimensional tensors and leaves under ``sl.replicate`` go whole to
every microbatch. Two leaves that disagree about the size of the batch are an error that names
them: guessing which one is meant would be silently wrong for somebody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stageline import torch_private as trees
from stageline.capturing.values import SIMPLE
from stageline.errors import BatchError
from stageline.running.hidden import find_hidden_tensor
from stageline.running.sizes import MicrobatchSizes, checked_sizes, refuse_unknown, split_sizes
from stageline.wording import a_kind

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
        sizes: MicrobatchSizes | None = None,
    ) -> None:
        self._args = _Sliceable(args, "args", batch_dims)
        self._kwargs = _Sliceable(kwargs, "kwargs", batch_dims)
        self._target = _Sliceable(target, "target", batch_dims)
        self._check_names(batch_dims)
        self.rows = self._agreed_rows(rows)
        if sizes is None:
            self.sizes = split_sizes(self.rows, min(num_microbatches, self.rows))
        else:
            self.sizes = checked_sizes(sizes, self.rows, num_microbatches)
        self.count = len(self.sizes)
        self._starts = [0, *accumulate(self.sizes)]
        self._sliced_inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._sliced_targets: list[Any] = []
        self.weights: Sequence[float] | None = None  # where another rank has weighed the losses

    @property
    def _trees(self) -> tuple[_Sliceable, _Sliceable, _Sliceable]:
        return self._args, self._kwargs, self._target

    def _check_names(self, batch_dims: BatchDims) -> None:
        if isinstance(batch_dims, int):
            return
        # A call has no target, and a rank may be given only what it needs.
        absent = tuple(tree.root for tree in self._trees if not tree.has_data)
        names = [name for tree in self._trees for name in tree.names]
        present = [name for name in batch_dims if not name.startswith(("output", *absent))]
        refuse_unknown(present, names, "batch")

    def _agreed_rows(self, rows: int | None) -> int:
        """Return the one batch size that all split leaves have, or say which two disagree."""
        first: tuple[_Sliceable, int] | None = None
        for tree in self._trees:
            for index, dim, size in tree.sizes():
                if rows is None:
                    rows, first = size, (tree, index)
                elif size != rows:
                    says = f"{_named(first)} says"
                    raise BatchError(_disagreement(tree, index, dim, says, rows))
        if rows is None:
            given = [type(leaf).__name__ for tree in self._trees for leaf in tree.leaves]
            raise BatchError(
                "no argument has a batch dimension: wanted at least one tensor of one or more "
                f"dimensions, got {', '.join(given)}. Pass the batch as tensors"
            )
        if rows == 0:
            raise BatchError(f"{_named(first)} says the batch has 0 rows: skip empty batches")
        return rows

    @property
    def whole(self) -> Batch:
        """The batch as it was given, ``sl.replicate`` marks removed."""
        args, kwargs, target = (tree.whole() for tree in self._trees)
        return Batch(args, kwargs, target, self.rows)

    def part(self, index: int) -> Batch:
        """Return one microbatch, connected to the batch where that requires a gradient."""
        start, length = self._starts[index], self.sizes[index]
        args, kwargs, target = (tree.slice(start, length) for tree in self._trees)
        return Batch(args, kwargs, target, length)

    def inputs(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model for one microbatch, without a graph behind them."""
        if self._sliced_inputs:
            return self._sliced_inputs[index]
        start, length = self._starts[index], self.sizes[index]
        return (
            self._args.slice(start, length, detached=True),
            self._kwargs.slice(start, length, detached=True),
        )

    def target(self, index: int) -> Any:
        """Return the target of one microbatch."""
        if self._sliced_targets:
            return self._sliced_targets[index]
        return self._target.slice(self._starts[index], self.sizes[index])

    def slice_ahead(self, *, inputs: bool, targets: bool) -> None:
        """Make all slices at once, in the caller's thread.

        Every small operation gives the interpreter lock away; between ranks that are threads,
        getting it back costs far more than the slice.
        """
        if inputs:
            args = self._args.slices(self._starts, detached=True)
            kwargs = self._kwargs.slices(self._starts, detached=True)
            self._sliced_inputs = list(zip(args, kwargs, strict=True))
        if targets:
            self._sliced_targets = self._target.slices(self._starts)

    def receive_targets(self, targets: list[Any], weights: Sequence[float] | None) -> None:
        """Take the targets that another rank has cut, and what it weighs the losses with."""
        self._sliced_targets, self.weights = targets, weights

    @cached_property
    def inputs_with_gradient(self) -> list[bool]:
        """For each leaf of the arguments, whether it requires a gradient; empty if none does."""
        flags = [
            isinstance(leaf, Tensor) and leaf.requires_grad
            for leaf, _ in (*self._args.flat(), *self._kwargs.flat())
        ]
        return flags if any(flags) else []

    @cached_property
    def inputs_look_alike(self) -> bool:
        """Whether inputs of microbatches of one size differ in what is in tensors, no more.

        All slices of a plain tensor are alike, and what is not split is one object for all; what
        a container makes of its parts, or another kind of tensor of its slices, nobody knows.
        """
        given = (*self._args._tree, *self._kwargs._tree.values())
        return all(_is_plain(_unmarked(value)) for value in given)

    def named_leaves(self) -> list[tuple[str, Any]]:
        """Return every leaf of the batch, whole, with its name."""
        return [pair for tree in self._trees for pair in zip(tree.names, tree.leaves, strict=True)]

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch, whole."""
        return [*self.input_tensors(), *self._target.tensors()]

    def input_tensors(self) -> list[Tensor]:
        """Return those among the arguments of the model."""
        return [*self._args.tensors(), *self._kwargs.tensors()]

    def join_gradients(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Join the gradients of the arguments that require one, over all microbatches.

        Args:
            gradients: For each microbatch, one entry per such argument.
        """
        leaves = [
            (leaf, dim)
            for leaf, dim in (*self._args.flat(), *self._kwargs.flat())
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        return [
            _join_gradient(leaf, dim, parts, self.sizes)
            for (leaf, dim), parts in zip(leaves, zip(*gradients, strict=True), strict=True)
        ]


def _named(leaf: tuple[_Sliceable, int] | None) -> str:
    """Return the name of a leaf; without one, it was another rank that told the size."""
    return "the rank that holds stage 0" if leaf is None else leaf[0].names[leaf[1]]


def _disagreement(tree: _Sliceable, index: int, dim: int, says: str, rows: int) -> str:
    name, shape = tree.names[index], tuple(tree.leaves[index].shape)
    return (
        f"{name} has {shape[dim]} rows in dimension {dim} (shape {shape}), but {says} the batch "
        f"has {rows}. Wrap it in sl.replicate(...) if every microbatch needs it whole, or name its "
        f"batch dimension: batch_dims={{{name!r}: ...}}"
    )


def _join_gradient(
    leaf: Tensor, dim: int | None, parts: Sequence[Tensor | None], sizes: Sequence[int]
) -> Tensor | None:
    """Concatenate what belongs to the slices of a leaf, or add up what belongs to all of it."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if dim is None:
        return sum(present[1:], start=present[0])
    shapes = [[*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]] for size in sizes]
    filled = [
        leaf.new_zeros(shape) if part is None else part
        for part, shape in zip(parts, shapes, strict=True)
    ]
    return torch.cat(filled, dim)


class _Sliceable:
    """One tree of a batch; ``dims``: where each leaf is split, None if it goes whole."""

    def __init__(self, tree: Any, root: str, batch_dims: BatchDims) -> None:
        self._tree = tree
        self.root = root
        # By far the most common trees, one tensor and a tuple of one, are sliced without detours.
        self._is_tensor = isinstance(tree, Tensor)
        self._is_one = type(tree) is tuple and len(tree) == 1 and isinstance(tree[0], Tensor)
        if self._is_tensor or self._is_one:
            leaves = [tree if self._is_tensor else tree[0]]
        else:
            is_empty = type(tree) in (tuple, dict) and not tree
            leaves = [] if is_empty else trees.tree_flatten(tree)[0]
        self.leaves = [_unmarked(leaf) for leaf in leaves]
        self.dims = [self._batch_dim(leaf, index, batch_dims) for index, leaf in enumerate(leaves)]
        self.has_data = any(leaf is not None for leaf in leaves)

    @cached_property
    def _spec(self) -> trees.TreeSpec:
        return trees.tree_flatten(self._tree)[1]

    @cached_property
    def names(self) -> list[str]:
        """Names of the leaves, as messages and ``batch_dims`` use them: ``kwargs['mask']``."""
        if self._is_tensor:
            return [self.root]
        if self._is_one:
            return [f"{self.root}[0]"]
        if not self.leaves:
            return []
        return trees.leaf_names(self._tree, root=self.root)

    def _batch_dim(self, leaf: Any, index: int, batch_dims: BatchDims) -> int | None:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, Replicated):
                self._refuse_hidden(leaf, index)
            return None
        if leaf.dim() == 0:
            return None
        if isinstance(batch_dims, int):
            dim: int | None = batch_dims
        else:
            dim = batch_dims.get(self.names[index], 0)
        if dim is None:
            return None
        if leaf.layout is not torch.strided:
            raise BatchError(
                f"{self.names[index]} is a tensor of layout {leaf.layout}, which cannot be split: "
                "pass it dense, or wrap it in sl.replicate(...)"
            )
        if not -leaf.dim() <= dim < leaf.dim():
            raise BatchError(
                f"{self.names[index]} has shape {tuple(leaf.shape)}, so it has no dimension {dim} "
                "to be split along: correct batch_dims or wrap it in sl.replicate(...)"
            )
        return dim % leaf.dim()

    def _refuse_hidden(self, leaf: Any, index: int) -> None:
        if isinstance(leaf, np.ndarray):
            raise BatchError(f"{self.names[index]} is a numpy array: pass torch.from_numpy(...)")
        where = find_hidden_tensor(leaf)
        if where is not None:
            raise BatchError(
                f"{self.names[index]} is {a_kind(leaf)} with a tensor in {where}, which "
                "cannot be split: pass a dict or a tuple, or wrap it in sl.replicate(...)"
            )

    def sizes(self) -> list[tuple[int, int, int]]:
        """Return (leaf, dimension, size) for every leaf that is split."""
        return [
            (index, dim, leaf.shape[dim])
            for index, (leaf, dim) in enumerate(zip(self.leaves, self.dims, strict=True))
            if dim is not None
        ]

    def whole(self) -> Any:
        return trees.tree_unflatten(self.leaves, self._spec)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf, _ in self.flat() if isinstance(leaf, Tensor)]

    def flat(self) -> list[tuple[Any, int | None]]:
        """Return every leaf with its dimension, those inside ``sl.replicate`` included."""
        return [
            (leaf, dim)
            for entry, dim in zip(self.leaves, self.dims, strict=True)
            for leaf in ((entry,) if isinstance(entry, Tensor) else trees.tree_flatten(entry)[0])
        ]

    def slices(self, starts: Sequence[int], *, detached: bool = False) -> list[Any]:
        """Return all slices; those of a single tensor are made by one operation."""
        if not self.leaves:
            return [self._tree] * (len(starts) - 1)
        if (self._is_tensor or self._is_one) and self.dims[0] is not None:
            leaf = self.leaves[0]
            if detached or not leaf.requires_grad:
                # Unsafe only where a graph hangs on it; each part has a version counter of its own.
                lengths = [end - start for start, end in pairwise(starts)]
                parts = torch.unsafe_split_with_sizes(leaf.data, lengths, self.dims[0])
                return list(parts) if self._is_tensor else [(part,) for part in parts]
        return [
            self.slice(start, end - start, detached=detached) for start, end in pairwise(starts)
        ]

    def slice(self, start: int, length: int, *, detached: bool = False) -> Any:
        if not self.leaves:
            return self._tree
        if (self._is_tensor or self._is_one) and self.dims[0] is not None:
            part = _narrow(self.leaves[0], self.dims[0], start, length, detached)
            return part if self._is_tensor else (part,)
        leaves = [
            leaf if dim is None else _narrow(leaf, dim, start, length, detached)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return trees.tree_unflatten(leaves, self._spec)


def _is_plain(value: Any) -> bool:
    if type(value) in (Tensor, nn.Parameter):
        return value.layout is torch.strided and not value.is_nested
    return type(value) in SIMPLE


def _narrow(leaf: Tensor, dim: int, start: int, length: int, detached: bool) -> Tensor:
    # Slices of one tensor share its version counter: a layer that works in place on one microbatch
    # would seem to have changed all of them. ``data`` has a counter of its own.
    if detached or not leaf.requires_grad:
        leaf = leaf.data
    # narrow, not split: a view with several siblings may not be changed in place.
    return leaf.narrow(dim, start, length)


def _unmarked(leaf: Any) -> Any:
    """Return a leaf without its ``sl.replicate`` mark, and without marks inside it."""
    if not isinstance(leaf, Replicated):
        return leaf
    inside = trees.tree_flatten(leaf.value)[0]
    if not any(isinstance(value, Replicated) for value in inside):
        return leaf.value
    return trees.tree_map_only(Replicated, _unmarked, leaf.value)
