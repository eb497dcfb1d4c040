"""What is made of parameters alone: leaves of the stage, and what its code computes from those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

_PLAIN = (Tensor, nn.Parameter)


class Parameters:
    """Tells, while a stage runs, which values depend on its parameters and on nothing else.

    A value counts only if it is proved: it is a parameter of the stage, or its graph ends in such
    and nowhere else. ``w.t()`` does, and so do a normalised weight, and an embedding of positions.

    Args:
        leaves: The parameters of the stage that require a gradient, by identity.
    """

    __slots__ = ("_leaves", "_made", "_nodes")

    def __init__(self, leaves: Mapping[int, nn.Parameter]) -> None:
        self._leaves = leaves
        # With the node that each had: an operation in place gives a tensor another one.
        self._made: dict[int, tuple[Tensor, Node]] = {}
        self._nodes: set[Node] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        if id(tensor) in self._leaves:
            return True
        found = self._made.get(id(tensor))
        return found is not None and found[0] is tensor and tensor.grad_fn is found[1]

    def sort(self, values: Iterable[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return which of some arguments are made of parameters alone, and which others differ.

        Only tensors that require a gradient count: all others are constants to a graph.
        """
        # Runs for every operation of a stage: no call that can be avoided.
        inside: list[Tensor] = []
        outside: list[Tensor] = []
        leaves, made = self._leaves, self._made
        for value in values:
            if isinstance(value, Tensor):
                if value.requires_grad:
                    here = id(value) in leaves or (id(value) in made and value in self)
                    (inside if here else outside).append(value)
            elif isinstance(value, (list, tuple)):
                more, others = self.sort(value)
                inside += more
                outside += others
        return inside, outside

    def learn(self, results: Any) -> None:
        """Take in what was computed from parameters, if that can be proved."""
        for tensor in tensors_of((results,)):
            node = tensor.grad_fn
            if type(tensor) in _PLAIN and node is not None and self._is_proved(node):
                self._made[id(tensor)] = (tensor, node)
                self._nodes.add(node)

    def _is_proved(self, node: Node) -> bool:
        waiting, seen = [node], set(self._nodes)
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            following = [after for after, _ in node.next_functions if after is not None]
            if not following and id(getattr(node, "variable", None)) not in self._leaves:
                return False
            waiting += following
        return True


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def exchanged(value: Any, new: Mapping[int, Tensor]) -> Any:
    """Return an argument with other tensors in the place of some, by identity."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(exchanged(part, new) for part in value)
    return value


def all_plain(tensors: Iterable[Tensor]) -> bool:
    """Return whether tensors are torch's own, not of a class that overrides operations."""
    return all(type(tensor) in _PLAIN for tensor in tensors)
