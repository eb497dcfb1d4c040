"""A recording cut at positions: for each stage the code that runs, and the values it exchanges.

    cut            |                 |
    stage 0   a ── b ──▶ b ──────────▶ b        b is used by stage 2: stage 1 hands it through
    stage 1        |    c = f(b) ────▶ c
    stage 2        |                 | d = g(b, c)

Values travel from stage to stage only, so that gradients come back the same way: through the
consumers of a value, last to first, as the plain model adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from stageline.capturing.dependence import Dependence, is_flag
from stageline.capturing.guards import is_guard
from stageline.capturing.recording import Recording
from stageline.capturing.regions import EVERYWHERE, begin_region, end_region
from stageline.capturing.streams.frames import Route, route_of
from stageline.errors import CaptureError
from stageline.wording import a


@dataclass(frozen=True, eq=False)
class StageCode:
    """The code of one stage.

    Attributes:
        graph: What runs. Its arguments are the values it uses, then the inputs it uses; it returns
            the values it makes for later stages, the last one the leaves of the result.
        uses: The values of earlier stages that it uses.
        inputs: The places, among the leaves of the model's arguments, of the inputs it uses.
        makes: The values it makes for later stages.
        carries: All values that leave it: those it makes, and those it hands through.
        attributes: The names of modules, parameters, buffers and constants in it.
        opened: The opened modules whose training flag the model reads there.
        has_regions: Whether it enters no_grad or autocast regions.
        changes: The values of earlier stages that it changes in place.
        route: Where in the model its calls of modules and its draws lie.
    """

    graph: FxGraph
    uses: tuple[Node, ...]
    inputs: tuple[int, ...]
    makes: tuple[Node, ...]
    carries: tuple[Node, ...]
    attributes: tuple[str, ...]
    opened: tuple[str, ...]
    has_regions: bool
    changes: tuple[Node, ...]
    route: Route = field(default_factory=Route)


@dataclass(frozen=True, eq=False)
class _Needs:
    """What one stage computes: its own nodes, and those it computes anew."""

    nodes: list[Node]
    uses: list[Node]
    inputs: list[Node]
    flags: tuple[str, ...]


class Cutter:
    """Cuts one recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.dependence = Dependence(recording)
        self._places = {node: index for index, node in recording.inputs.items()}
        self._results = [leaf for leaf in recording.output if isinstance(leaf, Node)]

    def crossing(self, position: int) -> list[Node]:
        """Return the values that cross a cut at a position."""
        uses: dict[Node, None] = {}
        needs = self._needs(position, self.recording.num_nodes, set(), is_last=True)
        uses.update(dict.fromkeys(needs.uses))
        return sorted(uses, key=self._order)

    def _order(self, node: Node) -> int:
        return self.dependence.position.get(node, -1)

    def cut(self, cuts: Sequence[int]) -> list[StageCode]:
        """Return the code of the stages between these positions."""
        bounds = [0, *cuts, self.recording.num_nodes]
        last = len(bounds) - 2
        needs: list[_Needs] = []
        wanted: set[Node] = set()
        for stage in range(last, -1, -1):  # what later stages use decides what earlier ones keep
            need = self._needs(bounds[stage], bounds[stage + 1], wanted, is_last=stage == last)
            wanted |= set(need.uses)
            needs.insert(0, need)
        self._check_buffers(needs)
        carries = [
            sorted(
                {
                    value
                    for later in needs[stage + 1 :]
                    for value in later.uses
                    if self._order(value) < bounds[stage + 1]
                },
                key=self._order,
            )
            for stage in range(last + 1)
        ]
        self._check_opaque(carries)
        return [
            self._code(need, carries[stage - 1] if stage else [], carries[stage], stage == last)
            for stage, need in enumerate(needs)
        ]

    def _needs(self, begin: int, end: int, later: set[Node], *, is_last: bool) -> _Needs:
        """Return what a stage computes, and what it takes from earlier stages and from inputs."""
        depends = self.dependence
        own = [node for node in self.recording.nodes[begin:end] if not self._is_checked_early(node)]
        inside = set(own)
        wanted = [source for node in own for source in node.all_input_nodes]
        wanted += self._results if is_last else []
        renewed = depends.closure([node for node in wanted if node not in inside], begin)
        renewed = [node for node in renewed if node not in inside]
        nodes = self._without_dead([*renewed, *own], later, is_last)
        inside = set(nodes)
        sources = [source for node in nodes for source in node.all_input_nodes]
        sources += self._results if is_last else []
        outside = list(dict.fromkeys(node for node in sources if node not in inside))
        inputs = [node for node in outside if node.op == "placeholder" and node in depends.fixed]
        uses = [node for node in outside if node not in inputs]
        inputs.sort(key=self._places.__getitem__)
        flags = dict.fromkeys(
            path
            for position, path in self.recording.flags
            if begin <= position and (position < end or is_last)
        )
        return _Needs(nodes, sorted(uses, key=self._order), inputs, tuple(flags))

    def _is_checked_early(self, node: Node) -> bool:
        return is_guard(node.target) and node in self.dependence.fixed

    def _without_dead(self, nodes: list[Node], later: set[Node], is_last: bool) -> list[Node]:
        """Leave out what only others need: they compute it for themselves."""
        needed = set(self._results) if is_last else set(later)
        kept: list[Node] = []
        for node in reversed(nodes):
            is_free = node in self.dependence.renewable or bool(node.meta.get("pure"))
            is_free = is_free or node.op == "get_attr"
            is_free = is_free and not is_guard(node.target) and not node.meta.get("mutates")
            if is_free and node not in needed:
                continue
            needed.update(node.all_input_nodes)
            kept.append(node)
        return kept[::-1]

    def _code(
        self, needs: _Needs, enters: list[Node], carries: list[Node], is_last: bool
    ) -> StageCode:
        graph = FxGraph()
        twins = {node: graph.placeholder(node.name) for node in (*needs.uses, *needs.inputs)}
        has_regions = _copy_nodes(graph, needs.nodes, twins)
        made = set(needs.nodes)
        makes = [value for value in carries if value in made]
        if is_last:
            graph.output(map_arg(tuple(self.recording.output), twins.__getitem__))
        else:
            results = tuple(twins[value] for value in makes)
            graph.output(results[0] if len(results) == 1 else results)
        return StageCode(
            graph=graph,
            uses=tuple(needs.uses),
            inputs=tuple(self._places[node] for node in needs.inputs),
            makes=tuple(makes),
            carries=tuple(carries),
            attributes=named_in(needs.nodes),
            opened=needs.flags,
            has_regions=has_regions,
            changes=_changed(needs.nodes, enters),
            route=route_of([event for node in needs.nodes for event in node.meta.get("route", ())]),
        )

    def _check_buffers(self, needs: Sequence[_Needs]) -> None:
        """Refuse a buffer that one stage changes in place and another one reads."""
        for node in self.recording.nodes:
            if node.op != "get_attr" or not self.dependence.changes(node):
                continue
            changes = set(self.dependence.changes(node))
            users = {
                stage
                for stage, need in enumerate(needs)
                if changes & set(need.nodes) or node in need.nodes
            }
            if len(users) > 1:
                raise CaptureError(
                    f"{node.meta['where']}: the buffer {node.target} is changed in forward and "
                    f"used by stages {sorted(users)}: keep all its uses in one stage"
                )

    def _check_opaque(self, carries: Sequence[Sequence[Node]]) -> None:
        for values in carries:
            for value in values:
                if value.meta.get("opaque"):
                    raise CaptureError(
                        f"{value.meta['where']}: {a(value.meta['opaque'])} would have to cross a "
                        "cut, and nobody can look into it: return tensors in tuples or dicts, or "
                        "cut elsewhere"
                    )


def _copy_nodes(graph: FxGraph, nodes: Sequence[Node], twins: dict[Node, Node]) -> bool:
    """Copy nodes into a graph, inside their regions; return whether there are any regions."""
    region, has_regions = EVERYWHERE, False
    for node in nodes:
        wanted = node.meta.get("regions") or EVERYWHERE
        if wanted != region and not is_guard(node.target):
            if region != EVERYWHERE:
                graph.call_function(end_region, ())
            if wanted != EVERYWHERE:
                graph.call_function(begin_region, (wanted,))
                has_regions = True
            region = wanted
        twins[node] = graph.node_copy(node, twins.__getitem__)
    if region != EVERYWHERE:
        graph.call_function(end_region, ())
    return has_regions


def named_in(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the attributes that some nodes name, but for training flags."""
    names = (str(node.target) for node in nodes if node.op in ("call_module", "get_attr"))
    return tuple(dict.fromkeys(name for name in names if not is_flag(name)))


def _changed(nodes: Sequence[Node], enters: Sequence[Node]) -> tuple[Node, ...]:
    """Return the values entering a stage that it changes in place, each alone in its memory.

    An argument of the model is not among them: the user may want to see it changed.
    """
    storages = {storage for node in nodes for storage in node.meta.get("mutates", ())}
    places = [value.meta.get("storage") for value in enters]
    return tuple(
        value
        for value, place in zip(enters, places, strict=True)
        if place in storages and places.count(place) == 1 and value.op != "placeholder"
    )
