"""Values that are trees: tuples, dicts, dataclasses, and the classes that libraries register."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from stageline.capturing.symbols import is_symbol
from stageline.torch_private import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

SIMPLE = (type(None), bool, int, float, complex, str, bytes, type(...))
_LEAVES = frozenset({*SIMPLE, Tensor, nn.Parameter})


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a tree and its structure; dataclasses are trees too.

    Example:
        >>> import torch
        >>> @dataclasses.dataclass
        ... class Pair:
        ...     left: Tensor
        ...     right: int
        >>> flatten([Pair(torch.tensor(1), 2), 3])[0]
        [tensor(1), 2, 3]
    """
    leaves, spec = tree_flatten(value)
    strangers = {type(leaf) for leaf in leaves if _is_unknown_dataclass(leaf)}
    if not strangers:
        return leaves, spec
    for kind in strangers:
        # From here on torch knows how to look into it, wherever trees are walked; with a name, it
        # can cross between processes.
        name = f"{kind.__module__}.{kind.__qualname__}"
        register_dataclass(kind, serialized_type_name=name)
    return flatten(value)


def _is_unknown_dataclass(leaf: Any) -> bool:
    kind = type(leaf)
    if is_symbol(leaf) or kind in SUPPORTED_NODES or not dataclasses.is_dataclass(kind):
        return False
    fields = dataclasses.fields(leaf)
    # One that computes fields or keeps some out of its constructor cannot be rebuilt from them.
    return all(field.init for field in fields) and any(
        _has_tensor(getattr(leaf, field.name, None)) for field in fields
    )


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) or is_symbol(leaf) for leaf in tree_flatten(value)[0])


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    return tree_unflatten(leaves, spec)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a tree in the order of ``flatten``; for most trees much faster.

    Example:
        >>> leaves_of(((1, [2]), {"b": 3, "a": None}))
        [1, 2, 3, None]
    """
    kind = type(value)
    if kind in _LEAVES:
        return [value]
    if kind is tuple or kind is list:
        return [leaf for part in value for leaf in leaves_of(part)]
    if kind is dict:
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    return flatten(value)[0]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among the leaves."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same tree with every leaf replaced; the same object if none was."""
    leaves, spec = flatten(value)
    mapped = [function(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return unflatten(mapped, spec)


def access_paths(value: Any) -> Iterator[tuple[tuple[tuple[str, Any], ...], Any]]:
    """Yield for each leaf how to reach it: ``(("item", 0), ("attribute", "x"))``, and the leaf."""
    flatten(value)  # so that its dataclasses are known
    for path, leaf in tree_flatten_with_path(value)[0]:
        yield tuple(_access(key) for key in path), leaf


def _access(key: Any) -> tuple[str, Any]:
    if isinstance(key, SequenceKey):
        return "item", key.idx
    if isinstance(key, MappingKey):
        return "item", key.key
    if isinstance(key, GetAttrKey):
        return "attribute", key.name
    return "item", getattr(key, "key", key)
