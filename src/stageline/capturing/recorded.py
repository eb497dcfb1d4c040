"""A recorded model as something that can be cut: positions, costs, names and stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from stageline import log
from stageline.capturing.cutting import Cutter
from stageline.capturing.dependence import attribute_of, is_flag
from stageline.capturing.graph import Call, Crossing, Cuttable, Load, Mark, Tie
from stageline.capturing.guards import is_guard
from stageline.capturing.inputs import Arguments
from stageline.capturing.looks import Look, look_at
from stageline.capturing.names import ModelNames
from stageline.capturing.recording import Recording, record
from stageline.capturing.staged import StagedModel, Variant
from stageline.capturing.survey import Survey, survey
from stageline.capturing.verifying import verify
from stageline.errors import CaptureError, ConfigError
from stageline.torch_private import storage_of
from stageline.wording import aligned, from_to, shares


def capture(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Graph:
    """Run a model once on an example and return what it does, ready to be cut.

    The model is left as it was found. Recorded is what lies between the calls of its layers; the
    layers themselves stay the user's own modules.

    Example:
        >>> import torch
        >>> graph = capture(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.randn(2, 4),))
        >>> [call.path for call in graph.calls]
        ['', '0', '1']

    Args:
        model: Any module.
        args: The arguments of one call, as a batch of a few rows.
        kwargs: Its keyword arguments.
    """
    faults = _argument_faults(model, args, kwargs)
    if faults:
        raise ConfigError("sl.capture", faults)
    names = ModelNames(model)
    arguments = Arguments.of(args, kwargs or {})
    look = look_at(model, arguments)
    graph = Graph(names, arguments, look.seen)
    if graph.recording.checkpoints:
        log.warning(
            0,
            f"{graph.recording.checkpoints[0]}: activation checkpointing in code that is cut open "
            "gives the same values but saves no memory: checkpoint inside the layers instead",
        )
    if not graph._verify(look) and look.arguments is not arguments:
        # The code goes another way with one row more, which may have other layers.
        return graph._surveyed(survey(model, *arguments.copied().unpacked()))
    return graph


def _argument_faults(model: object, args: object, kwargs: object) -> list[str]:
    faults = []
    if not isinstance(model, nn.Module):
        faults.append(f"model: wanted a module, got {type(model).__name__}")
    if not isinstance(args, (tuple, list)):
        faults.append(f"args: wanted a tuple of arguments, got {type(args).__name__}: (x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        faults.append(f"kwargs: wanted a dict, got {type(kwargs).__name__}")
    return faults


@dataclass(frozen=True)
class _Anchor:
    """Where a cut lies, in words that hold for every recording of the model."""

    what: str  # "call", "cut" or "block"
    name: str
    occurrence: int
    at_end: bool

    def __str__(self) -> str:
        side = "end" if self.at_end else "begin"
        return f"the {side} of {self.what} {self.occurrence + 1} of {self.name}"


class Graph(Cuttable):
    """A recorded model: what it does, where it may be cut, and what that would cost.

    Made by :func:`stageline.capture`; ``stageline.partition`` cuts it into a plan.
    """

    def __init__(
        self,
        names: ModelNames,
        arguments: Arguments,
        seen: Survey,
        *,
        paths: Sequence[str] = (),
        num_stages: int = 1,
    ) -> None:
        self._names = names
        self._arguments = arguments
        self._survey = seen
        choice = seen.choose(num_stages)
        self._opened = choice.opened | _ways(names, paths)
        self._members = choice.members
        self.recording: Recording = record(names, arguments, self._opened or frozenset({""}))
        self._cutter = Cutter(self.recording)
        self.num_nodes = self.recording.num_nodes
        self.calls: Sequence[Call] = tuple(self.recording.calls)
        self.marks: Sequence[Mark] = tuple(self.recording.marks)
        self.findings = tuple(self.recording.findings)
        self.module_names = tuple(names.modules)
        self.fingerprint = _fingerprint(self.recording, names.model)

    @property
    def model(self) -> nn.Module:
        return self._names.model

    @property
    def example(self) -> Arguments:
        """The arguments it was recorded with."""
        return self._arguments

    def __repr__(self) -> str:
        blocks = len(self.cuts) + 1
        return f"Graph of {type(self.model).__name__}: {self.num_nodes} nodes, {blocks} blocks"

    def __str__(self) -> str:
        """List the blocks, which are what ``split=[3, 2]`` counts."""
        spans = list(pairwise([0, *self.cuts, self.num_nodes]))
        loads = [self.load(*span) for span in spans]
        columns = {
            "block": [str(index) for index in range(len(spans))],
            "parameters": [f"{load.parameters:,}" for load in loads],
            "time": shares([load.time for load in loads]),
            "calls": [from_to(self.label(*span)) for span in spans],
        }
        return f"{self!r}\n{aligned(columns, left=['calls'])}"

    @cached_property
    def cuts(self) -> Sequence[int]:  # type: ignore[override]  # computed when first asked for
        """Where cuts may lie: at the marks, else between the calls of repeated layers."""
        if self.marks:
            places = {mark.begin for mark in self.marks} | self._ends_of_blocks()
        else:
            members = [call for call in self.calls if call.path in self._members]
            places = {call.end for call in members} | {call.begin for call in members[:1]}
        return tuple(place for place in sorted(places) if self._has_work(place))

    def _ends_of_blocks(self) -> set[int]:
        """Return where blocks end, unless only glue follows before the next one begins."""
        ends = set()
        for mark in self.marks:
            following = [other.begin for other in self.marks if other.begin >= mark.end]
            stop = min(following, default=self.num_nodes)
            inner = (call for call in self.calls if not call.opened)
            if any(mark.end <= call.begin < stop for call in inner):
                ends.add(mark.end)
        return ends

    def _has_work(self, place: int) -> bool:
        """Whether something is computed on both sides of a position."""
        nodes = self.recording.nodes
        return any(map(_is_work, nodes[:place])) and any(map(_is_work, nodes[place:]))

    # -- what it costs

    def load(self, begin: int, end: int) -> Load:
        nodes = self.recording.nodes[begin:end]
        readings = [node.meta["reading"] for node in nodes if node.meta.get("reading")]
        tensors = {storage_of(tensor): tensor for tensor in self._tensors(begin, end).values()}
        return Load(
            time=sum(reading.time for reading in readings),
            parameters=sum(tensor.numel() for tensor in tensors.values()),
            parameter_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
            activation_bytes=sum(reading.made for reading in readings),
        )

    def work(self, begin: int, end: int) -> tuple[int, int]:
        """Return the operations and the bytes moved of some nodes, forward, for the example."""
        nodes = self.recording.nodes[begin:end]
        readings = [node.meta["reading"] for node in nodes if node.meta.get("reading")]
        return sum(r.flops for r in readings), sum(r.moved for r in readings)

    def _tensors(self, begin: int, end: int) -> dict[str, Tensor]:
        """Return the parameters that some nodes use, by name."""
        found: dict[str, Tensor] = {}
        for node in self.recording.nodes[begin:end]:
            if node.op not in ("call_module", "get_attr"):
                continue
            target = str(node.target)
            if is_flag(target):
                continue
            value = attribute_of(self.recording, target)
            if isinstance(value, nn.Module):
                names = ((f"{target}.{name}", p) for name, p in value.named_parameters())
                found.update(names)
            elif isinstance(value, nn.Parameter):
                found[target] = value
        return found

    def crossing(self, position: int) -> Sequence[Crossing]:
        return tuple(_crossing(node) for node in self._cutter.crossing(position))

    def ties(self, cuts: Sequence[int]) -> Sequence[Tie]:
        ends = [0, *cuts, self.num_nodes]
        users: dict[int, set[int]] = {}
        tensors: dict[int, dict[str, Tensor]] = {}
        for stage, (begin, end) in enumerate(pairwise(ends)):
            for name, tensor in self._tensors(begin, end).items():
                users.setdefault(storage_of(tensor), set()).add(stage)
                tensors.setdefault(storage_of(tensor), {})[name] = tensor
        return tuple(
            Tie(
                tuple(tensors[storage]),
                tuple(sorted(stages)),
                max(tensor.numel() for tensor in tensors[storage].values()),
            )
            for storage, stages in users.items()
            if len(stages) > 1
        )

    # -- what people see

    def label(self, begin: int, end: int) -> tuple[str, ...]:
        labels = [
            f"{call.path or 'model'} {call.kind}"
            for call in self.calls
            if not call.opened and begin <= call.begin and call.end <= end
        ]
        return tuple(labels) if labels else (f"{end - begin} operations",)

    # -- cutting

    def opened_at(self, paths: Sequence[str], *, num_stages: int = 1) -> Graph:
        wanted = self._survey.choose(num_stages)
        opened = wanted.opened | _ways(self._names, paths)
        if opened <= self.recording.opened and wanted.members == self._members:
            return self
        return Graph(self._names, self._arguments, self._survey, paths=paths, num_stages=num_stages)

    def _surveyed(self, seen: Survey) -> Graph:
        """Return the graph for what another run showed."""
        self._survey = seen
        return self.opened_at(())

    def _verify(self, look: Look) -> bool:
        """Raise unless the recording, replayed, gives what the model gives.

        With one row more than it was recorded with: that says all that the same rows would say.
        Only where it says nothing, these are replayed.

        Returns:
            Whether one row more goes the same way through the code.
        """
        whole, first = self._staged(()), self._arguments
        other = look.arguments if look.arguments is not first else first.with_one_row_more()
        if other is not None:
            is_seen = verify(
                self.model,
                lambda leaves: whole.run(*other.with_leaves(leaves).unpacked()),
                other,
                wanted=look.result_for(other),
            )
            if is_seen and len(whole.variants) == 1:
                return True
        verify(
            self.model,
            lambda leaves: whole.replay(whole.variants[0].name, leaves),
            first,
            wanted=look.result_for(first),
        )
        return False

    def cut(self, cuts: Sequence[int]) -> StagedModel:
        staged = self._staged(cuts)
        first = staged.variants[0].name
        verify(self.model, lambda leaves: staged.replay(first, leaves), self._arguments)
        return staged

    def _staged(self, cuts: Sequence[int]) -> StagedModel:
        """Cut without looking whether the stages together do what the model does."""
        anchors = [self._anchor(place) for place in cuts]
        opened = self.recording.opened

        def record_again(arguments: Arguments) -> Variant:
            recording = record(self._names, arguments, opened, grad=torch.is_grad_enabled())
            variant = Variant(recording, Cutter(recording), _places(recording, anchors))
            alone = StagedModel(variant, record_again, {})
            verify(
                self.model,
                lambda leaves: alone.replay(variant.name, leaves),
                arguments,
                grad=recording.grad,
            )
            return variant

        first = Variant(self.recording, self._cutter, cuts)
        first.saw(self._arguments)
        modules = {path: self._names.module(path) for path in sorted(opened)}
        return StagedModel(first, record_again, modules)

    def _anchor(self, place: int) -> _Anchor:
        for anchor, position in _anchors(self.recording):
            if position == place:
                return anchor
        raise CaptureError(f"position {place} lies at no call of a module and at no mark")


def _fingerprint(recording: Recording, model: nn.Module) -> str:
    """Return a digest of what the model does and of the shapes of its parameters."""
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return sha256(f"{recording.fingerprint} {shapes}".encode()).hexdigest()[:16]


def _ways(names: ModelNames, paths: Sequence[str]) -> frozenset[str]:
    """Return the modules that must be opened to reach some others."""
    ways = {""} if paths else set()
    for path in paths:
        parts = path.split(".")
        ways |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return frozenset(way for way in ways if way in names.modules)


def _anchors(recording: Recording) -> Sequence[tuple[_Anchor, int]]:
    """Return every place that has a name: ends and beginnings of calls, and marks."""
    found: list[tuple[_Anchor, int]] = []
    counts: dict[tuple[str, str], int] = {}
    for mark in recording.marks:
        count = counts.get((mark.kind, mark.name), 0)
        counts[mark.kind, mark.name] = count + 1
        found.append((_Anchor(mark.kind, mark.name, count, False), mark.begin))
        found.append((_Anchor(mark.kind, mark.name, count, True), mark.end))
    for call in recording.calls:
        found.append((_Anchor("call", call.path, call.occurrence, True), call.end))
        found.append((_Anchor("call", call.path, call.occurrence, False), call.begin))
    return found


def _places(recording: Recording, anchors: Sequence[_Anchor]) -> list[int]:
    known = dict(_anchors(recording))
    missing = [str(anchor) for anchor in anchors if anchor not in known]
    if missing:
        raise CaptureError(
            f"the model does something else for this batch: it does not come to {missing[0]}, "
            "where it is cut. Cut elsewhere, or keep this decision inside one stage"
        )
    places = [known[anchor] for anchor in anchors]
    if sorted(set(places)) != places:
        raise CaptureError(
            "the model does something else for this batch: it comes to its cuts in another order"
        )
    return places


def _is_work(node: Node) -> bool:
    if node.op == "get_attr" or is_guard(node.target):
        return False
    return not node.meta.get("pure")


def _crossing(node: Node) -> Crossing:
    text = node.meta.get("text", node.meta.get("opaque", "number"))
    return Crossing(node.name, text, node.meta.get("bytes", 8))
