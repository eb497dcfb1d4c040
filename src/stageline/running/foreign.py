"""A stage, or the loss, that uses a parameter of another stage: found in its first graph.

A penalty such as ``sum(p.pow(2).sum() for p in model.parameters())`` in ``loss_fn`` reaches into
every stage. On another process that parameter's gradient would be lost without a word, and between
threads it would be added in any order; so it is refused everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from weakref import ReferenceType

from torch import Tensor, nn
from torch.autograd.graph import Node

from stageline.errors import EdgeError


class Owner(NamedTuple):
    """Who may use a parameter.

    Attributes:
        stages: The stages that may: one, or all that a tied parameter belongs to.
        home: The stage to name when another one does.
        name: The name in the model.
        parameter: By a weak reference: a process must not keep the stages of others alive, and an
            id alone could pass to another tensor.
    """

    stages: frozenset[int]
    home: int
    name: str
    parameter: ReferenceType[nn.Parameter]


class ForeignParameters:
    """Knows which stages every parameter belongs to, and looks at each stage's graph once."""

    def __init__(self, owners: Mapping[int, Owner]) -> None:
        self._owners = owners
        self._seen: set[int] = set()

    def is_known(self, stage: int) -> bool:
        """Whether a graph of a stage was looked at before."""
        return stage in self._seen

    def check(self, stage: int, results: Iterable[object]) -> None:
        """Raise if the graph of what a stage made ends in a parameter of another stage."""
        roots = [result.grad_fn for result in results if isinstance(result, Tensor)]
        for variable in _leaves(root for root in roots if root is not None):
            owner = self._owners.get(id(variable))
            if owner is None or stage in owner.stages:
                continue
            if owner.parameter() is variable:
                raise EdgeError(
                    f"stage {stage}, or the loss computed there, uses {owner.name}, a parameter of "
                    f"stage {owner.home}: put both into one stage; a penalty on weights belongs "
                    "into the optimizer (weight_decay) or into the stage that has them"
                )
        self._seen.add(stage)


def _leaves(roots: Iterable[Node]) -> Iterable[object]:
    """Yield the tensors in which a graph ends."""
    seen: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions if following is not None]
