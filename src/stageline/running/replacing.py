"""A module over other tensors: copied only along the way to them, everything else stays shared.

    given    stage ─┬─ block ─┬─ weight           copy    stage' ─┬─ block' ─┬─ other
                    │         └─ config                           │          └─ config
                    └─ norm                                       └─ norm

What neither is nor reaches a replaced tensor (norm, config) is the same object in both, so what the
user changes there later is seen by both.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_CLOSED = (Tensor, type, ModuleType, FunctionType, str, bytes, int, float, complex, type(None))

# What every module keeps its parameters, children and hooks in: a copy needs its own, or what is
# registered in the one appears in the other.
_TABLES = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))
)


class Replacement:
    """Copies modules so that they use other tensors; one tensor has one replacement everywhere.

    Example:
        >>> given = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> other = nn.Parameter(given[0].weight.detach())
        >>> made = Replacement({id(given[0].weight): (given[0].weight, other)}).apply(given)
        >>> made[0].weight is other, made[0].bias is given[0].bias, made[1] is given[1]
        (True, True, True)
    """

    def __init__(self, tensors: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self._new = {old: new for old, (_, new) in tensors.items()}
        # Identities are only worth something while their objects live.
        self._alive = [old for old, _ in tensors.values()]
        # Kept from call to call: a module that stands in two stages has one copy.
        self._memo: dict[int, Any] = dict(self._new)

    def apply(self, module: nn.Module) -> nn.Module:
        """Return the module itself if it uses none of the tensors, else a copy.

        Raises:
            ValueError: It cannot be copied; the text says why.
        """
        if not self._new:
            return module
        things, changed = self._reach(module)
        if id(module) not in changed:
            return module
        own = {
            id(table)
            for thing in things.values()
            if isinstance(thing, nn.Module)
            for name, table in vars(thing).items()
            if name in _TABLES
        }
        for number, thing in things.items():
            if number not in changed and number not in own:
                self._memo.setdefault(number, thing)
        try:
            made = copy.deepcopy(module, self._memo)
        except Exception as cause:
            raise ValueError(f"copying it failed with {type(cause).__name__}: {cause}") from cause
        self._check(module, made)
        return made

    def _reach(self, root: nn.Module) -> tuple[dict[int, object], set[int]]:
        """Return all objects within reach, and those that are or reach a replaced tensor."""
        things: dict[int, object] = {id(root): root}
        users: dict[int, list[int]] = defaultdict(list)
        waiting: list[object] = [root]
        while waiting:
            thing = waiting.pop()
            for part in _inside(thing):
                users[id(part)].append(id(thing))
                if id(part) not in things:
                    things[id(part)] = part
                    waiting.append(part)
        changed: set[int] = set()
        reached = [number for number in self._new if number in things]
        while reached:
            number = reached.pop()
            if number not in changed:
                changed.add(number)
                reached += users[number]
        return things, changed

    def _check(self, given: nn.Module, made: nn.Module) -> None:
        """A class that copies itself in its own way may have made new tensors instead."""
        wanted = {name: self._new.get(id(tensor), tensor) for name, tensor in _tensors(given)}
        got = dict(_tensors(made))
        wrong = [name for name, tensor in wanted.items() if got.get(name) is not tensor]
        if wrong:
            raise ValueError(f"its copy has a {wrong[0]} of its own")


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )


def _inside(thing: object) -> Iterable[object]:
    """Return what a copy of an object would copy too."""
    if isinstance(thing, _CLOSED):
        return ()
    if isinstance(thing, dict):
        return chain(thing.keys(), thing.values())
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return thing
    if isinstance(thing, MethodType):
        return (thing.__self__,)
    if isinstance(thing, partial):
        return (thing.func, thing.args, thing.keywords)
    return vars(thing).values() if hasattr(thing, "__dict__") else ()
