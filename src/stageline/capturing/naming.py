"""What the modules of a model are called, also those that were never registered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# What every module has of its own: hooks, flags, the registered children. Nothing else hides here.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEEPEST = 3  # lists of lists of blocks; what lies deeper belongs to somebody else
_MOST = 10_000  # a longer list holds data


def named_everywhere(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module that hangs on a model, each once, under its first name.

    Registered modules come first, in the order of ``named_modules``. Then come those that
    attributes of other modules hold: ``layers.0`` for the first of ``self.layers = [...]``.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.stem = nn.ReLU()
        ...         self.layers = [nn.Tanh()]
        >>> list(named_everywhere(Net()))
        ['', 'stem', 'layers.0']
    """
    names = dict(model.named_modules())
    known = {id(module) for module in names.values()}
    waiting = list(names.items())
    for owner_name, owner in waiting:  # grows while it is read
        for name, found in _held(owner_name, owner):
            for inner_name, inner in found.named_modules(prefix=name):
                if id(inner) not in known:
                    known.add(id(inner))
                    names[inner_name] = inner
                    waiting.append((inner_name, inner))
    return names


def _held(prefix: str, owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for attribute, value in list(vars(owner).items()):
        if attribute not in _OF_EVERY_MODULE:
            yield from _found(f"{prefix}.{attribute}" if prefix else attribute, value, 0)


def _found(name: str, value: Any, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
    elif depth < _DEEPEST:
        for part, inner in _parts(value):
            yield from _found(f"{name}.{part}", inner, depth + 1)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping | list | tuple) and len(value) > _MOST:
        return
    if isinstance(value, Mapping):
        yield from list(value.items())
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif not isinstance(value, type | Tensor) and type(value).__module__ != "builtins":
        yield from list(getattr(value, "__dict__", {}).items())
