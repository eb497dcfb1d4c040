"""What to open, and between which calls to cut, if the user does not say.

Opened are the modules on the way to repeated layers, and a layer itself only if it is too big for
a stage and mostly made of repeated layers again. A model without any is opened from the outside,
the largest first, until there is enough to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from stageline.capturing.families import Family
from stageline.capturing.visits import Visit


@dataclass(frozen=True)
class Choice:
    """What to open and where cuts may lie.

    Attributes:
        opened: The names of the modules to open; "" is the model. Empty if it must not be opened.
        members: The names of the modules between whose calls a cut may lie, in order.
    """

    opened: frozenset[str]
    members: tuple[str, ...]


def choose(visits: Sequence[Visit], families: Sequence[Family], num_stages: int) -> Choice:
    """Choose for a number of stages: what is worth opening depends on how big a stage is."""
    if not visits or not visits[0].is_openable:
        return Choice(frozenset(), ())
    chooser = _Chooser(visits, num_stages)
    chooser.take(_reachable(families))
    if chooser.num_calls() < max(num_stages, 2):
        chooser.open_the_largest(2 * num_stages)
    return Choice(frozenset(chooser.opened), _completed(list(chooser.members), visits))


def _reachable(families: Sequence[Family]) -> list[Family]:
    return [
        family
        for family in families
        if all(visit.closed is None for visit in family.members[0].ancestors())
    ]


def _completed(members: list[str], visits: Sequence[Visit]) -> tuple[str, ...]:
    """Add the layers that this run left out, as layerdrop does: another run may call them."""
    called = {visit.path: type(visit.module) for visit in visits}
    alike = {(path.rpartition(".")[0], called[path]) for path in members}
    for path, module in visits[0].module.named_modules():
        container, _, last = path.rpartition(".")
        if path not in called and last.isdecimal() and (container, type(module)) in alike:
            neighbours = [other for other in members if other.rpartition(".")[0] == container]
            before = [other for other in neighbours if int(other.rpartition(".")[2]) < int(last)]
            at = members.index(before[-1]) + 1 if before else members.index(neighbours[0])
            members.insert(at, path)
    return tuple(members)


class _Chooser:
    """The choice as it is made."""

    def __init__(self, visits: Sequence[Visit], num_stages: int) -> None:
        self.opened: set[str] = {""}
        self.members: dict[str, None] = {}  # in order, each once
        self._visits = visits
        self._num_stages = num_stages
        self._sizes: dict[int, int] = {}

    def num_calls(self) -> int:
        return sum(visit.path in self.members for visit in self._visits)

    def take(self, families: Sequence[Family]) -> None:
        """Take the outermost of these families, and others in members that have to be opened."""
        members = {id(visit) for family in families for visit in family.members}
        for family in families:
            if any(id(visit) in members for visit in family.members[0].ancestors()):
                continue
            for member in family.members:
                inner = [
                    other
                    for other in families
                    if any(visit is member for visit in other.members[0].ancestors())
                ]
                if member.closed is None and self._is_worth_opening(member, inner):
                    self.take(inner)
                else:
                    self.opened.update(visit.path for visit in member.ancestors())
                    self.members[member.path] = None

    def _is_worth_opening(self, member: Visit, inner: Sequence[Family]) -> bool:
        if not inner:
            return False
        own = self._size(member.module)
        is_big = own * 2 * self._num_stages > self._size(self._visits[0].module)
        repeated = {
            id(parameter): parameter.numel()
            for family in inner
            for visit in family.members
            for parameter in visit.module.parameters()
        }
        return is_big and 2 * sum(repeated.values()) >= own

    def open_the_largest(self, wanted: int) -> None:
        """Make all calls in opened modules members; open the largest until there are enough."""
        while True:
            calls = self._calls_to_choose_from()
            # Activations and dropouts between them make no stage.
            heavy = [visit for visit in calls if self._size(visit.module)] or calls
            openable = [visit for visit in calls if visit.is_openable]
            if len(heavy) >= wanted or not openable:
                break
            self.opened.add(max(openable, key=self._weight).path)
        self.members = dict.fromkeys(visit.path for visit in calls)

    def _calls_to_choose_from(self) -> list[Visit]:
        return [
            visit
            for visit in self._visits[1:]
            if visit.path not in self.opened
            and all(around.path in self.opened for around in visit.ancestors())
        ]

    def _weight(self, visit: Visit) -> tuple[int, int]:
        return self._size(visit.module), sum(1 for _ in visit.descendants())

    def _size(self, module: nn.Module) -> int:
        if id(module) not in self._sizes:
            sizes = (parameter.numel() for parameter in module.parameters())
            self._sizes[id(module)] = sum(sizes)
        return self._sizes[id(module)]
