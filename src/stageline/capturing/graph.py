"""What can be cut: nodes in forward order, the positions between them, and what happened there.

    node      0     1     2     3     4
    position  0     1     2     3     4     5       a cut at 3 separates nodes 0..2 from 3..4
    calls     [emb] [layer.0]   [layer.1]           each call of a module covers some nodes

A recorded model and a plain ``nn.Sequential`` are both seen this way, so that splits, plans and
balance know one kind of thing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        path: The module's name in the model, ``layers.3``; "" is the model itself.
        occurrence: 0 for its first call, 1 for its second.
        kind: The name of its class.
        begin: The position before its first node.
        end: The position after its last node.
        opened: Whether it was recorded inside; an unopened call is one node.
    """

    path: str
    occurrence: int
    kind: str
    begin: int
    end: int
    opened: bool


@dataclass(frozen=True)
class Mark:
    """A place that the model's own code marked.

    Attributes:
        kind: ``"cut"`` for a CutPoint, ``"block"`` for a Block scope or a begun block.
        name: The name of the block; for a CutPoint its name in the model.
        begin: The position where it begins.
        end: The position where it ends; for a CutPoint the same.
        where: File and line that reached it.
    """

    kind: str
    name: str
    begin: int
    end: int
    where: str = ""


@dataclass(frozen=True)
class Crossing:
    """A value that crosses a cut.

    Attributes:
        name: What the recorded graph calls it.
        text: Type and shape of the example, ``float32 [4, 16, 32]``.
        num_bytes: Its size in the example.
    """

    name: str
    text: str
    num_bytes: int


@dataclass(frozen=True)
class Load:
    """What a run of nodes costs; estimates from the example.

    Attributes:
        time: Nanoseconds of forward and backward on a nominal machine.
        parameters: How many numbers it trains or keeps.
        parameter_bytes: Their bytes.
        activation_bytes: What one microbatch like the example keeps for backward.
    """

    time: int
    parameters: int
    parameter_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class Tie:
    """A parameter or buffer that several stages use.

    Attributes:
        names: All names it has in the model.
        stages: The stages that use it.
        num_parameters: How many numbers each of these stages counts for it; 0 for a buffer.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    num_parameters: int = 0


class Cuttable(ABC):
    """Something that can be cut at positions.

    Attributes:
        num_nodes: How many nodes; positions go from 0 to this number.
        calls: Every call of a module, in the order in which they began.
        marks: What the model's code marked, in the order reached.
        cuts: Positions between blocks where a cut may lie if nobody says otherwise, ascending,
            without 0 and ``num_nodes``.
        module_names: The names of all modules of the model, called or not.
        fingerprint: A digest of structure and names: equal for equal models.
        findings: What is wrong with the marks.
    """

    num_nodes: int
    calls: Sequence[Call]
    marks: Sequence[Mark]
    cuts: Sequence[int]
    module_names: Sequence[str]
    fingerprint: str
    findings: Sequence[str] = ()

    @abstractmethod
    def load(self, begin: int, end: int) -> Load:
        """Return what the nodes between two positions cost."""

    @abstractmethod
    def crossing(self, position: int) -> Sequence[Crossing]:
        """Return what crosses a cut at a position."""

    @abstractmethod
    def ties(self, cuts: Sequence[int]) -> Sequence[Tie]:
        """Return the parameters and buffers that several stages use if cut at these positions."""

    @abstractmethod
    def label(self, begin: int, end: int) -> tuple[str, ...]:
        """Return what lies between two positions, for people: ``("layers.3 Block",)``."""

    @abstractmethod
    def opened_at(self, paths: Sequence[str], *, num_stages: int = 1) -> Cuttable:
        """Return the same model with possible cuts at these modules' calls, opened where needed.

        With ``num_stages``, also so that there are enough blocks for so many stages, if possible.
        """

    @abstractmethod
    def cut(self, cuts: Sequence[int]) -> Any:
        """Return what runs: an object with ``stages`` (modules) and ``run(args, kwargs)``."""
