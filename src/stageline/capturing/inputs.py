"""The arguments of a model's call, as a recording sees them: named leaves, and what they are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.values import SIMPLE, flatten, unflatten
from stageline.torch_private import TreeSpec, tree_flatten_with_path

_NO_TREE = frozenset({Tensor, nn.Parameter, *SIMPLE})
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True)
class Arguments:
    """One call's arguments, flat.

    Attributes:
        leaves: Tensors and plain values.
        spec: How they make ``(args, kwargs)`` again.
    """

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        leaves = [*args, *kwargs.values()]
        if all(type(leaf) in _NO_TREE for leaf in leaves):  # by far the most common call
            return cls(leaves, _flat_spec(len(args), tuple(kwargs)))
        return cls(*flatten((tuple(args), dict(kwargs))))

    def key(self) -> tuple[Any, ...]:
        """Return what a recording is bound to, whatever the sizes: types, dimensions, constants."""
        first: dict[int, int] = {}
        same: list[int] = []  # code may ask whether two arguments are one tensor
        kinds: list[Any] = []
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                same.append(first.setdefault(id(leaf), place))
            kinds.append(_leaf_key(leaf))
        return (self.spec, tuple(same), *kinds)

    def sizes(self) -> tuple[Any, ...]:
        """Return the sizes of all tensors."""
        return tuple(tuple(leaf.shape) for leaf in self.leaves if isinstance(leaf, Tensor))

    def with_leaves(self, leaves: list[Any]) -> Arguments:
        return Arguments(leaves, self.spec)

    def unpacked(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = unflatten(self.leaves, self.spec)
        return args, kwargs

    def copied(self) -> Arguments:
        """Return the same arguments in memory of their own, so that a run cannot change them."""
        twins: dict[int, Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in twins:
                twin = leaf.detach().clone(memory_format=torch.preserve_format)
                twins[id(leaf)] = twin.requires_grad_(leaf.requires_grad)
            return twins[id(leaf)]

        return self.with_leaves([copy(leaf) for leaf in self.leaves])

    @property
    def rows(self) -> int | None:
        """The size of the batch: that of the first tensor; None if it has no rows."""
        rows = [leaf.shape[0] for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.dim()]
        return rows[0] if rows and rows[0] else None

    def is_batch(self, leaf: Any) -> bool:
        """Whether a leaf has a row for each of the batch."""
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows

    def with_one_row_more(self) -> Arguments | None:
        """Return the arguments for a batch with its first row repeated; None if it has no rows."""
        return None if self.rows is None else self.with_rows(self.rows + 1)

    def with_rows(self, count: int) -> Arguments:
        """Return the arguments for a batch of another size: rows left out, or repeated in turn."""
        rows = self.rows
        assert rows is not None
        twins: dict[int, Tensor] = {}  # one tensor given twice stays one

        def resized(leaf: Any) -> Any:
            if not self.is_batch(leaf):
                return leaf
            if id(leaf) not in twins:
                whole, rest = divmod(count, rows)
                parts = [leaf.detach()] * whole + [leaf.detach()[:rest]] * bool(rest)
                twins[id(leaf)] = torch.cat(parts).requires_grad_(leaf.requires_grad)
            return twins[id(leaf)]

        return self.with_leaves([resized(leaf) for leaf in self.leaves])


@lru_cache(maxsize=256)
def _flat_spec(num_args: int, names: tuple[str, ...]) -> TreeSpec:
    """Return how leaves make ``(args, kwargs)`` again where each is an argument."""
    return flatten(((0,) * num_args, dict.fromkeys(names, 0)))[1]


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (Tensor, leaf.dtype, leaf.dim(), leaf.requires_grad, leaf.device.type)
    if type(leaf) in (int, float):
        return (type(leaf),)  # what the code decides by it, guards will say
    if type(leaf) in SIMPLE:
        return (type(leaf), leaf)
    # An object: the same one, with the same plain values in it.
    inside = getattr(leaf, "__dict__", {})
    values = tuple((name, repr(v)) for name, v in inside.items() if type(v) in SIMPLE)
    return (type(leaf), id(leaf), values)


def leaf_names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return a name for each leaf of the arguments, after the parameters of ``forward``."""
    positional = _positional_names(model, len(args))
    names = []
    for path, _ in tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        place, *rest = (str(getattr(key, "idx", getattr(key, "key", key))) for key in path)
        first = rest[0] if rest else "input"
        parts = [positional[int(first)] if place == "0" else first, *rest[1:]]
        name = re.sub(r"\W", "_", "_".join(parts))
        names.append(name if name.isidentifier() else f"input_{name}")
    return names


def _positional_names(model: nn.Module, count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return [*names[:count], *(f"arg{index}" for index in range(len(names), count))]


def ambient_key() -> tuple[Any, ...]:
    """Return what surrounds a call and changes what a model computes: autocast."""
    return tuple(
        (name, torch.get_autocast_dtype(name))
        for name in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(name)
    )
