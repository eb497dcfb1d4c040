"""A graph written down by hand: what a recording would be, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stageline.capturing.graph import Call, Crossing, Cuttable, Load, Mark, Tie


@dataclass
class FakeParts:
    """Stages that say what they are; a run returns its arguments."""

    stages: list[nn.Module]

    def run(self, args: Any, kwargs: Any) -> Any:
        return args, kwargs


class FakeGraph(Cuttable):
    """Nodes are names of unopened modules; "" is an operation between them.

    A node costs as much as it has parameters, 10 unless told; operations cost nothing.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        opened: Mapping[str, tuple[int, int]] | None = None,
        marks: Sequence[Mark] = (),
        cuts: Sequence[int] | None = None,
        uncalled: Sequence[str] = (),
        loads: Sequence[Load] | None = None,
        crossing_bytes: Sequence[int] = (),
        ties: Sequence[Tie] = (),
        fingerprint: str = "f00d",
    ) -> None:
        self.nodes = list(nodes)
        self.num_nodes = len(nodes)
        calls = [Call(path, 0, "Holder", *span, True) for path, span in (opened or {}).items()]
        for index, path in enumerate(nodes):
            if path:
                earlier = self.nodes[:index].count(path)
                calls.append(Call(path, earlier, "Layer", index, index + 1, False))
        self.calls = sorted(calls, key=lambda call: (call.begin, -call.end))
        self.marks = list(marks)
        self.cuts = list(range(1, self.num_nodes)) if cuts is None else list(cuts)
        self.module_names = ["", *dict.fromkeys([call.path for call in self.calls]), *uncalled]
        self.fingerprint = fingerprint
        self.wanted: list[tuple[list[str], int]] = []
        self._loads = loads or [Load(10, 10, 40, 0) if path else Load(0, 0, 0, 0) for path in nodes]
        self._crossing_bytes = crossing_bytes
        self._ties = ties

    def load(self, begin: int, end: int) -> Load:
        part = self._loads[begin:end]
        return Load(
            sum(load.time for load in part),
            sum(load.parameters for load in part),
            sum(load.parameter_bytes for load in part),
            sum(load.activation_bytes for load in part),
        )

    def crossing(self, position: int) -> Sequence[Crossing]:
        if not self._crossing_bytes:
            return []
        return [Crossing("x", "float32 [2, 4]", self._crossing_bytes[position])]

    def ties(self, cuts: Sequence[int]) -> Sequence[Tie]:
        return self._ties

    def label(self, begin: int, end: int) -> tuple[str, ...]:
        return tuple(f"{path} Layer" for path in self.nodes[begin:end] if path) or ("add",)

    def opened_at(self, paths: Sequence[str], *, num_stages: int = 1) -> FakeGraph:
        self.wanted.append((list(paths), num_stages))
        return self

    def cut(self, cuts: Sequence[int]) -> FakeParts:
        return FakeParts([nn.Identity() for _ in range(len(cuts) + 1)])


def transformer() -> FakeGraph:
    """An embedding, four layers with an operation before the second, a norm and a head."""
    nodes = ["embed", "layers.0", "", "layers.1", "layers.2", "layers.3", "norm", "head"]
    return FakeGraph(nodes, uncalled=["layers", "unused"])


def iterative() -> FakeGraph:
    """The network of PiPPy's document: one block three times, then a projection."""
    return FakeGraph(["iter_block", "iter_block", "iter_block", "output_proj"])
