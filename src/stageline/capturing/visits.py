"""The call tree of a model: which module called which, and which of them may be opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from stageline.capturing.sequential import has_hooks

# The modules of torch whose forward only calls others: their steps are seen from outside.
_PLAIN_IN_TORCH = (
    nn.Sequential,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)


@dataclass(frozen=True, eq=False)
class Visit:
    """One call of a module in the surveyed run.

    Attributes:
        module: The module.
        path: Its name in the model; "" is the model itself.
        occurrence: 0 for its first call, 1 for its second.
        parent: The call in which this one happened, None for that of the model.
        children: The calls that happened in this one, in order; complete when the survey is.
        has_hooks: Whether calling it does more than its forward.
        is_checkpointed: Whether its forward is run once more in the backward.
        closed: Why the module must not be opened: it is run as it is, or not at all. None if it
            may be opened.
    """

    module: nn.Module = field(repr=False)
    path: str
    occurrence: int
    parent: Visit | None = field(repr=False)
    children: list[Visit] = field(default_factory=list, repr=False)
    has_hooks: bool = field(init=False)
    is_checkpointed: bool = field(init=False)
    closed: str | None = field(init=False)

    def __post_init__(self) -> None:
        # The only way to set a field that follows from others in a frozen dataclass.
        object.__setattr__(self, "has_hooks", has_hooks(self.module))
        object.__setattr__(self, "is_checkpointed", is_checkpointed(self.module))
        object.__setattr__(self, "closed", _why_closed(self))

    @property
    def is_openable(self) -> bool:
        """Whether opening the module would show more than it does now."""
        return self.closed is None and bool(self.children)

    def ancestors(self) -> Iterator[Visit]:
        """Yield the calls around this one, the nearest first."""
        visit = self.parent
        while visit is not None:
            yield visit
            visit = visit.parent

    def descendants(self) -> Iterator[Visit]:
        """Yield the calls in this one, in the order in which they began."""
        for child in self.children:
            yield child
            yield from child.descendants()


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module runs its own call under gradient checkpointing, as transformers' layers do.

    The flag alone says nothing: the models around the layers carry it too.
    """
    flag = getattr(module, "gradient_checkpointing", False) is True and module.training
    return flag and any("__call__" in vars(kind) for kind in _own_classes(module))


def is_composite(module: nn.Module) -> bool:
    """Whether a module has two parts with parameters of their own; it may be one of them."""
    parts = (part for part in module.modules() if any(True for _ in part.parameters(recurse=False)))
    return next(parts, None) is not None and next(parts, None) is not None


def _own_classes(module: nn.Module) -> list[type]:
    mro = type(module).__mro__
    return list(mro[: mro.index(nn.Module)])


def _why_closed(visit: Visit) -> str | None:
    module = visit.module
    if visit.has_hooks:
        return "it has hooks, which belong to the call as a whole"
    if visit.is_checkpointed:
        return "it is checkpointed: opened, it would keep all its activations"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    # `module.compile()` leaves no other trace.
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled"
    if visit.parent is not None and "forward" in vars(module):
        return "its forward was replaced on the object"
    return _why_its_class_is_closed(module)


def _why_its_class_is_closed(module: nn.Module) -> str | None:
    for kind in _own_classes(module):
        if "forward" in vars(kind):
            is_torch = kind.__module__.partition(".")[0] == "torch"
            if not is_torch or kind in _PLAIN_IN_TORCH:
                return None
            return f"its forward is that of {kind.__module__}.{kind.__qualname__}"
    return None if "forward" in vars(module) else "its class has no forward"
