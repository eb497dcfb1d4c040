"""One plain run of a model: which module calls which, and which calls are those of repeated layers.

Nothing is recorded here. The survey says what a recording should open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageline.capturing.choosing import Choice, choose
from stageline.capturing.families import (
    Family,
    Trace,
    chained_families,
    related_calls,
    tensors_in,
)
from stageline.capturing.interception import intercepted
from stageline.capturing.naming import named_everywhere
from stageline.capturing.recording import without_cache
from stageline.capturing.snapshot import preserved
from stageline.capturing.visits import Visit, is_composite

__all__ = ["Choice", "Family", "Survey", "Visit", "survey", "survey_structure"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they hold modules and are never called


@dataclass(frozen=True)
class Survey:
    """What one run showed.

    Attributes:
        visits: Every call of a module, in the order in which they began; the first is the model's.
        families: The calls of repeated layers.
    """

    visits: tuple[Visit, ...]
    families: tuple[Family, ...]

    def choose(self, num_stages: int | None) -> Choice:
        """Return what to open, and between which calls to cut.

        Args:
            num_stages: How many stages are wanted; None if nobody knows yet.

        Example:
            >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
            >>> model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(block(), block(), block()))
            >>> choice = survey(model, (torch.zeros(1, 3),), {}).choose(3)
            >>> sorted(choice.opened), choice.members
            (['', '1'], ('1.0', '1.1', '1.2'))
        """
        return choose(self.visits, self.families, num_stages or 1)


def survey(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Survey:
    """Run a model once and return what was seen; the model and the arguments are left as they were.

    It is run in the mode that it is in. A model of which parameters are on meta cannot be run; what
    is known of it is its structure.
    """
    return survey_with_result(model, args, kwargs)[0]


def survey_with_result(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Survey, tuple[Any] | None]:
    """Return what was seen, and what the model gave; None if a plain call might give other flags.

    Without a cache that nobody asked for, as the model is recorded.
    """
    parameters = list(model.parameters())
    if any(parameter.is_meta for parameter in parameters):
        return survey_structure(model), None
    kwargs = {**kwargs, **without_cache(model, kwargs)}
    frozen = [parameter for parameter in parameters if _can_be_unfrozen(parameter)]
    try:
        return _run(model, args, kwargs, frozen)
    except Exception:
        if not frozen:
            raise
        # A model may write to its frozen parameters in place, which it cannot do to others.
        return _run(model, args, kwargs, [])


def _can_be_unfrozen(parameter: nn.Parameter) -> bool:
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_number and not parameter.requires_grad and not parameter.is_inference()


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    frozen: list[nn.Parameter],
) -> tuple[Survey, tuple[Any] | None]:
    witness = _Witness(model)
    tensors = [*model.parameters(), *tensors_in((args, dict(kwargs)))]
    has_graph = not any(tensor.is_inference() for tensor in tensors)  # no graph takes such tensors
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(has_graph),
        preserved(model, args, kwargs),
    ):
        # What feeds what is read from the autograd graph; without one, layers are not seen to be
        # chained. The flags are put back with everything else.
        for parameter in frozen:
            parameter.requires_grad_(True)
        with intercepted(model, witness):
            result = model(*args, **kwargs)
        families = chained_families(witness.visits, witness.traces)
    is_plain = has_graph and not frozen
    return Survey(tuple(witness.visits), tuple(families)), (result,) if is_plain else None


class _Witness:
    """Notes the calls of one run."""

    def __init__(self, model: nn.Module) -> None:
        self.visits: list[Visit] = []
        self.traces: dict[int, Trace] = {}
        self._paths = {id(module): path for path, module in named_everywhere(model).items()}
        self._calls: dict[int, int] = {}
        self._around: list[Visit] = []

    def __call__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if id(module) not in self._paths:  # made on the way, such as a loss function
            return call(*args, **kwargs)
        visit = self._visit(module)
        trace = None
        if is_composite(module):
            trace = self.traces[id(visit)] = Trace.of_arguments(args, kwargs)
        with self._within(visit):
            result = call(*args, **kwargs)
        if trace is not None:
            trace.note_result(result)
        return result

    def _visit(self, module: nn.Module) -> Visit:
        parent = self._around[-1] if self._around else None
        occurrence = self._calls.get(id(module), 0)
        self._calls[id(module)] = occurrence + 1
        visit = Visit(module, self._paths[id(module)], occurrence, parent)
        self.visits.append(visit)
        if parent is not None:
            parent.children.append(visit)
        return visit

    @contextmanager
    def _within(self, visit: Visit) -> Iterator[None]:
        self._around.append(visit)
        try:
            yield
        finally:
            self._around.pop()


def survey_structure(model: nn.Module) -> Survey:
    """Return what the structure of a model suggests: each module called once, as registered.

    Numbered modules in one place are taken for a family. What is called "experts" is not: they
    stand in a list as layers do, but each gets its share of the same input.
    """
    visits: list[Visit] = []
    _visit_registered(model, "", None, visits, set())
    groups = [
        group
        for group in related_calls(visits)
        if not any("expert" in part for part in group[0].path.lower().split(".")[-2:])
    ]
    return Survey(tuple(visits), tuple(Family(tuple(group)) for group in groups))


def _visit_registered(
    module: nn.Module, path: str, parent: Visit | None, visits: list[Visit], seen: set[int]
) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    if not isinstance(module, _CONTAINERS):
        visit = Visit(module, path, 0, parent)
        visits.append(visit)
        if parent is not None:
            parent.children.append(visit)
        parent = visit
    for name, child in module.named_children():
        _visit_registered(child, f"{path}.{name}" if path else name, parent, visits, seen)
