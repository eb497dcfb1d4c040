"""What opened code reads from its modules, watched: a recording holds only as long as it stays.

Opened modules run once, when they are recorded. A number that they keep (``self.scale``) is then
part of the recording; if somebody changes it, the model must be recorded again. A parameter or
module of theirs that somebody replaces is another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stageline.torch_private import MODULE_HOOKS, storage_of

_SIMPLE = (bool, int, float, str, type(None))
_TABLES = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MOST = 200


class Watch:
    """The attributes of some modules, as they were.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.scale = 0.5
        >>> watch = Watch({"layer": layer})
        >>> layer.scale = 0.7
        >>> watch.changed(), watch.replaced()
        (['layer.scale'], [])
        >>> layer.weight = nn.Parameter(layer.weight.detach().clone())
        >>> watch.replaced()
        ['layer.weight']
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._numbers = self._read(_numbers)
        self._objects = self._read(_objects)
        self._unnamed_numbers = self._list(_numbers)
        self._unnamed_objects = self._list(_objects)
        self._contents = self._read(_contents)

    def _read(self, what: Any) -> dict[str, Any]:
        return {
            f"{path}.{name}".lstrip("."): value
            for path, module in self._modules.items()
            for name, value in what(module)
        }

    def _list(self, what: Any) -> list[Any]:
        """Return what ``_read`` does without names: they are wanted only if something differs."""
        return [list(what(module)) for module in self._modules.values()]

    def changed(self) -> list[str]:
        """Return the plain values that are others now; new ones are not among them."""
        if self._list(_numbers) == self._unnamed_numbers:
            return []
        return _differing(self._numbers, self._read(_numbers))

    def replaced(self) -> list[str]:
        """Return the parameters, buffers, modules and tensors that are others now, and hooks."""
        if self._list(_objects) == self._unnamed_objects:
            return []
        return _differing(self._objects, self._read(_objects), or_new=True)

    def altered(self) -> list[str]:
        """Return all that a run has changed, the contents of lists and dicts included."""
        contents = _differing(self._contents, self._read(_contents))
        return [*self.replaced(), *self.changed(), *contents]


class SharedObjects:
    """The plain objects that several modules hold: what one leaves there, another may read.

    Example:
        >>> class Shelf: pass
        >>> shelf, model = Shelf(), nn.Sequential(nn.ReLU(), nn.ReLU())
        >>> model[0].shelf = model[1].shelf = shelf
        >>> shared = SharedObjects(model)
        >>> shelf.value = 3
        >>> shared.altered()
        ['0.shelf.value']
    """

    def __init__(self, model: nn.Module) -> None:
        holders: dict[int, list[tuple[str, Any]]] = {}
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE and _is_plain_object(value):
                    where = f"{path}.{name}".lstrip(".")
                    holders.setdefault(id(value), []).append((where, value))
        self._shared = [held[0] for held in holders.values() if len(held) > 1]
        self._before = self._read()

    def _read(self) -> dict[str, Any]:
        return {
            f"{where}.{name}": _told(value)
            for where, shared in self._shared
            for name, value in list(vars(shared).items())[:_MOST]
        }

    def altered(self) -> list[str]:
        """Return what has changed in them, or is new."""
        return _differing(self._before, self._read(), or_new=True)


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value):
        return False
    return hasattr(value, "__dict__")


def _differing(
    before: Mapping[str, Any], now: Mapping[str, Any], *, or_new: bool = False
) -> list[str]:
    names = [name for name, value in before.items() if name not in now or now[name] != value]
    return names + [name for name in now if or_new and name not in before]


def _numbers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if name in _OF_EVERY_MODULE:
            continue
        if type(value) in _SIMPLE:
            yield name, repr(value)
        elif not isinstance(value, (nn.Module, Tensor, type)) and hasattr(value, "__dict__"):
            for inner, part in list(vars(value).items())[:_MOST]:  # a configuration
                if type(part) in _SIMPLE:
                    yield f"{name}.{inner}", repr(part)


def _objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for table in _TABLES:
        for name, value in vars(module)[table].items():
            yield name, _identity(value)
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and isinstance(value, Tensor):
            yield name, _identity(value)
    for name in MODULE_HOOKS:
        hooks = vars(module)[name]
        # Those that only collect results come with the first call that asks for them.
        yield name, sum(not _collects(hook) for hook in hooks.values()) if hooks else 0


def _identity(value: Any) -> Any:
    """Return by what a thing is known: a tensor by its memory, ``x.to(device)`` may be the same."""
    if isinstance(value, Tensor) and not is_lazy(value):
        return storage_of(value), tuple(value.shape)
    return id(value)


def _collects(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _contents(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE or not isinstance(value, (list, dict, set)):
            continue
        parts = value.items() if isinstance(value, dict) else value
        yield name, [_told(part) for part in list(parts)[:_MOST]] + [len(value)]


def _told(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_told(part) for part in value)
    return repr(value) if type(value) in _SIMPLE else id(value)
