"""``pippy.microbatch``: how arguments are cut into microbatches, and outputs joined."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stageline.running.microbatches import replicate
from stageline.torch_private import leaf_names, tree_flatten, tree_unflatten

__all__ = [
    "ArgsChunkSpec",
    "KwargsChunkSpec",
    "LossReducer",
    "TensorChunkSpec",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]


class TensorChunkSpec:
    """Cut a tensor along one dimension, and join the parts along it."""

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__name__}({self.split_dim})"

    def __str__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> tuple[TensorChunkSpec, ...]:
        """Return a spec for each dimension: ``(0, 1)`` cuts the second argument along 1."""
        return tuple(map(TensorChunkSpec, chunk_dims))

    @staticmethod
    def from_dict(chunk_dims: Mapping[str, int]) -> dict[str, TensorChunkSpec]:
        """Return a spec for each keyword argument."""
        return {name: TensorChunkSpec(dim) for name, dim in chunk_dims.items()}


class _Replicate:
    """Give the whole value to every microbatch."""


class _CustomReducer:
    """Join the parts of an output with a function: ``reduce_fn(so_far, part)``."""

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn


class LossReducer(_CustomReducer):
    """A reducer for a loss."""


_LossReducer = LossReducer
sum_reducer = LossReducer(torch.tensor(0.0), lambda total, part: total + part)

ChunkSpec = Any
"""A TensorChunkSpec, ``_Replicate``, or a tuple, list or dict of them."""


class _ChunkSpecs:
    """Sets how the arguments of pipes that are made inside of a ``with`` block are cut."""

    active: dict[type[_ChunkSpecs], Any] = {}  # noqa: RUF012  # set and reset by with blocks

    def __init__(self, chunk_dims: Any) -> None:
        self.specs = (
            TensorChunkSpec.from_dict(chunk_dims)
            if isinstance(chunk_dims, Mapping)
            else TensorChunkSpec.from_tuple(tuple(chunk_dims))
        )

    def __enter__(self) -> Any:
        self.active[type(self)] = self.specs
        return self.specs

    def __exit__(self, *failure: object) -> None:
        del self.active[type(self)]


class ArgsChunkSpec(_ChunkSpecs):
    """``with ArgsChunkSpec((0, 1)):``, a dimension for each positional argument."""


class KwargsChunkSpec(_ChunkSpecs):
    """``with KwargsChunkSpec({"mask": 1}):``, a dimension for each keyword argument."""


def active_specs() -> tuple[Any, Any]:
    """Return the specs of arguments and keyword arguments that hold here."""
    active = _ChunkSpecs.active
    return active.get(ArgsChunkSpec), active.get(KwargsChunkSpec)


def split_args_kwargs_into_chunks(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Sequence[ChunkSpec] | None = None,
    kwargs_chunk_spec: Mapping[str, ChunkSpec] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the arguments of each microbatch: tensors are cut, but for those without dimensions.

    These and all else go to every microbatch.

    Example:
        >>> args, kwargs = split_args_kwargs_into_chunks((torch.zeros(5, 2), 7), {}, 2)
        >>> [(tuple(x.shape), number) for x, number in args], kwargs
        ([((3, 2), 7), ((2, 2), 7)], [{}, {}])
    """
    kwargs = kwargs or {}
    args_specs = [None] * len(args) if args_chunk_spec is None else list(args_chunk_spec)
    if len(args_specs) != len(args):
        raise ValueError(f"args_chunk_spec has {len(args_specs)} entries for {len(args)} arguments")
    named = kwargs_chunk_spec or {}
    positional = [_split(each, spec, chunks) for each, spec in zip(args, args_specs, strict=True)]
    by_name = {name: _split(each, named.get(name), chunks) for name, each in kwargs.items()}
    return (
        [tuple(parts[index] for parts in positional) for index in range(chunks)],
        [{name: parts[index] for name, parts in by_name.items()} for index in range(chunks)],
    )


def _split(value: Any, spec: ChunkSpec, chunks: int) -> list[Any]:
    """Return the parts of one argument, which may be a tree of tensors."""
    leaves, structure = tree_flatten(value)
    split = [
        _split_leaf(leaf, one, chunks)
        for leaf, one in zip(leaves, _of_leaves(spec, len(leaves)), strict=True)
    ]
    return [tree_unflatten(list(parts), structure) for parts in zip(*split, strict=True)] or [
        value
    ] * chunks


def _split_leaf(leaf: Any, spec: Any, chunks: int) -> list[Any]:
    if isinstance(spec, TensorChunkSpec) and isinstance(leaf, Tensor) and leaf.dim():
        return list(leaf.tensor_split(chunks, spec.split_dim))
    if isinstance(spec, TensorChunkSpec) and _has_rows(leaf):
        return _split_mask(leaf, chunks)
    return [leaf] * chunks


def _has_rows(value: Any) -> bool:
    """Whether a value is a BlockMask of FlexAttention that is not the same for all rows."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # which takes long to import
    return (
        flex is not None and isinstance(value, flex.BlockMask) and value.kv_num_blocks.shape[0] > 1
    )


def _split_mask(mask: Any, chunks: int) -> list[Any]:
    """Cut a BlockMask along the batch."""
    tables = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    cut = {
        name: [None] * chunks if table is None else table.tensor_split(chunks)
        for name in tables
        for table in [getattr(mask, name)]
    }
    rows = (len(part) for part in mask.kv_num_blocks.tensor_split(chunks))
    begins = accumulate(rows, initial=0)

    def shifted(begin: int) -> Callable[..., Tensor]:
        return lambda b, h, q, kv: mask.mask_mod(b + begin, h, q, kv)

    return [
        mask.from_kv_blocks(
            **{name: cut[name][index] for name in tables},
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=shifted(begin),
            seq_lengths=mask.seq_lengths,
        )
        for index, begin in zip(range(chunks), begins, strict=False)
    ]


def _of_leaves(spec: ChunkSpec, count: int) -> list[Any]:
    """Return the spec of each leaf of a value."""
    if spec is None:
        return [TensorChunkSpec(0)] * count
    specs = tree_flatten(spec)[0]
    if len(specs) == 1:
        return specs * count
    if len(specs) != count:
        raise ValueError(f"a chunk spec has {len(specs)} entries for {count} values")
    return specs


def merge_chunks(chunks: Sequence[Any], chunk_spec: ChunkSpec) -> Any:
    """Return the output of the batch.

    Example:
        >>> merge_chunks([torch.zeros(2), torch.ones(1)], None)
        tensor([0., 0., 1.])
    """
    flat = [tree_flatten(chunk) for chunk in chunks]
    leaves, structure = flat[0]
    if any(other != structure for _, other in flat):
        raise ValueError("the outputs of the microbatches have different structures")
    specs = _of_leaves(chunk_spec, len(leaves))
    merged = [
        _merge(parts, spec)
        for parts, spec in zip(zip(*(each for each, _ in flat), strict=True), specs, strict=True)
    ]
    return tree_unflatten(merged, structure)


def _merge(parts: tuple[Any, ...], spec: ChunkSpec) -> Any:
    if isinstance(spec, _CustomReducer):
        return reduce(spec.reduce_fn, parts, spec.init_value)
    if isinstance(spec, TensorChunkSpec) and isinstance(parts[0], Tensor):
        return torch.cat(parts, spec.split_dim)
    if any(part is not parts[0] and _differs(part, parts[0]) for part in parts):
        raise ValueError(f"Cannot merge chunks with inconsistent values: {list(parts)}")
    return parts[0]


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return bool(one != other)


def batch_dims(args_spec: Any, kwargs_spec: Any) -> dict[str, int]:
    """Return the specs of arguments as a pipeline knows them: a dimension by the name of a leaf.

    Example:
        >>> batch_dims((TensorChunkSpec(0), TensorChunkSpec(1)), {"mask": TensorChunkSpec(2)})
        {'args[0]': 0, 'args[1]': 1, "kwargs['mask']": 2}
    """
    return {
        name: spec.split_dim
        for specs, root in ((args_spec, "args"), (kwargs_spec, "kwargs"))
        for name, spec in _named(specs, root)
        if isinstance(spec, TensorChunkSpec)
    }


def replicated(values: Any, specs: Any) -> Any:
    """Mark the values that go whole to every microbatch, as their specs say."""
    if specs is _Replicate or isinstance(specs, _Replicate):
        return replicate(values)
    if isinstance(specs, Mapping) and isinstance(values, dict):
        return {name: replicated(value, specs.get(name)) for name, value in values.items()}
    if isinstance(specs, (tuple, list)) and type(values) in (tuple, list):
        marked = [replicated(*each) for each in zip(values, specs, strict=False)]
        return type(values)((*marked, *values[len(marked) :]))
    return values


def _named(specs: Any, root: str) -> Iterator[tuple[str, Any]]:
    if specs is None:
        return
    yield from zip(leaf_names(specs, root=root), tree_flatten(specs)[0], strict=True)
