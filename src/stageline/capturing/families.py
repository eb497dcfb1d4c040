"""Which calls are those of repeated layers: siblings, alike in name, each fed by another one.

layers.0  ->  layers.1  ->  layers.2        a family: a cut may lie after each
experts.0     experts.1     experts.2       none of them gets what another one made: no family
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from stageline.capturing.visits import Visit, is_composite

_DEEPEST = 4  # how far tensors are looked for in arguments and results


@dataclass(frozen=True)
class Family:
    """Calls of repeated layers, in order."""

    members: tuple[Visit, ...]


@dataclass(frozen=True)
class Trace:
    """Where the tensors came from that one call took and gave.

    Attributes:
        taken: The nodes of the autograd graph behind what the call was given.
        given: The nodes behind what it returned, but for those that it only passed on.
        taken_plain: What it was given of tensors that are in no graph.
        given_plain: What it returned of such tensors, but for those that it only passed on.
    """

    taken: list[Node]
    taken_plain: list[Tensor]
    given: list[Node] = field(default_factory=list)
    given_plain: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
        return Trace(*_origins(tensors_in((args, dict(kwargs)))))

    def note_result(self, result: Any) -> None:
        nodes, plain = _origins(tensors_in(result))
        passed_on = {id(node) for node in self.taken}
        self.given.extend(node for node in nodes if id(node) not in passed_on)
        places = {_place(tensor) for tensor in self.taken_plain}
        self.given_plain.extend(tensor for tensor in plain if _place(tensor) not in places)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in arguments or a result, also those in objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEEPEST and not isinstance(value, nn.Module | type):
        for inner in _parts(value):
            yield from tensors_in(inner, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if is_dataclass(value) or type(value).__module__ != "builtins":
        return list(getattr(value, "__dict__", {}).values())
    return ()


def _origins(tensors: Iterable[Tensor]) -> tuple[list[Node], list[Tensor]]:
    nodes: list[Node] = []
    plain: list[Tensor] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            nodes.append(tensor.grad_fn)
        else:
            plain.append(tensor)
    return nodes, plain


def _place(tensor: Tensor) -> int:
    """Return what tells tensors in no graph apart: where their numbers lie."""
    try:
        return tensor.data_ptr() or id(tensor)
    except RuntimeError:  # some kinds of tensors have no memory of their own
        return id(tensor)


def related_calls(visits: Sequence[Visit]) -> list[list[Visit]]:
    """Return the calls that may be families: composite siblings of one container or one module."""
    composite: dict[int, bool] = {}
    groups: dict[tuple[int, str], list[Visit]] = {}
    for visit in visits:
        if visit.parent is None:
            continue
        if id(visit.module) not in composite:
            composite[id(visit.module)] = is_composite(visit.module)
        if composite[id(visit.module)]:
            groups.setdefault((id(visit.parent), container_of(visit.path)), []).append(visit)
    return [group for group in groups.values() if len(group) > 1]


def container_of(path: str) -> str:
    """Return the name of the list, or list of lists, that a module stands in; else its own name.

    Example:
        >>> container_of("encoder.layers.3"), container_of("blocks.2.0"), container_of("a.block")
        ('encoder.layers', 'blocks', 'a.block')
    """
    parts = path.split(".")
    while parts and parts[-1].isdecimal():
        parts.pop()
    return ".".join(parts)


def chained_families(visits: Sequence[Visit], traces: Mapping[int, Trace]) -> list[Family]:
    """Return the families among calls.

    Args:
        visits: All calls of the run.
        traces: What composite calls took and gave, by the identity of their visit.
    """
    families = []
    for group in related_calls(visits):
        members = _chained([(visit, traces[id(visit)]) for visit in group if id(visit) in traces])
        if len(members) > 1:
            families.append(Family(tuple(members)))
    return families


def _chained(group: Sequence[tuple[Visit, Trace]]) -> list[Visit]:
    """Return the calls that feed another one of the group or are fed by one."""
    makers: dict[Node, Visit] = {}
    plain_makers: dict[int, Visit] = {}
    older: set[Node] = set()  # nodes that lead to no member
    chained: dict[int, Visit] = {}
    for visit, trace in group:
        feeder = _feeder(trace.taken, makers, older)
        for tensor in trace.taken_plain:
            feeder = feeder or plain_makers.get(_place(tensor))
        if feeder is not None:
            chained[id(feeder)] = feeder
            chained[id(visit)] = visit
        makers.update((node, visit) for node in trace.given)
        plain_makers.update((_place(tensor), visit) for tensor in trace.given_plain)
    return [visit for visit, _ in group if id(visit) in chained]


def _feeder(taken: Sequence[Node], makers: Mapping[Node, Visit], older: set[Node]) -> Visit | None:
    """Return the member from which one of these nodes descends.

    The walk ends at the first member that it comes to. Without one it has seen all that is older
    than the members, and no later walk needs to go there again: a decoder's layers all take the
    output of the encoder, but the encoder is walked once.
    """
    stack = list(reversed(taken))  # hidden states tend to be the first argument
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in makers:
            return makers[node]
        if node in seen or node in older:
            continue
        seen.add(node)
        stack.extend(before for before, _ in reversed(node.next_functions) if before is not None)
    older |= seen
    return None
