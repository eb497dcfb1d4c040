"""A chain of a model's own modules, by a list of their names and of functions between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import nn

from stageline.errors import ConfigError
from stageline.wording import a_kind

Layer = str | Callable[..., Any]


class FunctionModule(nn.Module):
    """A plain function as a module without state."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def extra_repr(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))


class LayerList(nn.Sequential):
    """A chain that calls some module twice, or in another order than that of its names.

    Each module is held once, under its own name; ``order`` says when it is called.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        _register(self, layers)
        self.order = tuple(name for name, _ in layers)

    def forward(self, input: Any) -> Any:
        for layer in self:
            input = layer(input)
        return input

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.get_submodule(name) for name in self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LayerList([(name, self.get_submodule(name)) for name in self.order[index]])
        return self.get_submodule(self.order[index])

    def extra_repr(self) -> str:
        return f"order: {', '.join(self.order)}"


def layer_list(model: nn.Module, layers: Sequence[Layer]) -> nn.Sequential:
    """Return a chain of a model's own modules, under their own names, and functions between.

    Each layer is called with what the one before returned. The model's own ``forward`` is not
    used, and what the list does not name is not part of the chain.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
        ...         self.head = nn.Linear(8, 10)
        >>> chain = layer_list(Net(), ["features.0", "features.1", nn.Flatten(), "head"])
        >>> list(chain.state_dict())
        ['features.0.weight', 'features.0.bias', 'head.weight', 'head.bias']

    Args:
        model: The model; it is not changed.
        layers: Names of its modules in the order of their calls, ``"layer1.0"``; functions, or
            modules without state, stand between them. A name may stand twice.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError("sl.layer_list", [f"model: wanted a module, got {type(model).__name__}"])
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        got = type(layers).__name__
        raise ConfigError("sl.layer_list", [f"layers: wanted a list of layers, got {got}"])
    faults = [] if layers else ["layers: the list is empty"]
    for index, layer in enumerate(layers):
        faults += _layer_faults(f"layers[{index}]", model, layer)
    if faults:
        raise ConfigError("sl.layer_list", faults)
    names = {id(module): name for name, module in model.named_modules() if name}
    taken = {layer.split(".")[0] for layer in layers if isinstance(layer, str)}
    found: list[tuple[str, nn.Module]] = []
    for layer in layers:
        if isinstance(layer, str):
            found.append((layer, model.get_submodule(layer)))
        elif id(layer) in names:
            found.append((names[id(layer)], model.get_submodule(names[id(layer)])))
        else:
            module = layer if isinstance(layer, nn.Module) else FunctionModule(layer)
            found.append((_new_name(layer, taken), module))
    return chain_of(found)


def chain_of(layers: Sequence[tuple[str, nn.Module]]) -> nn.Sequential:
    """Return modules as one chain under their names; dots in names become nested containers.

    Example:
        >>> chain_of([("a.0", nn.ReLU()), ("b", nn.Tanh())])
        Sequential(
          (a): Sequential(
            (0): ReLU()
          )
          (b): Tanh()
        )
    """
    chain = nn.Sequential()
    containers = _register(chain, layers)
    if list(_order("", chain, containers)) == [name for name, _ in layers]:
        return chain
    return LayerList(layers)


def _register(chain: nn.Sequential, layers: Sequence[tuple[str, nn.Module]]) -> set[int]:
    """Give a chain its modules; return the containers that were made for dots in names."""
    containers = {id(chain)}
    names = {name for name, _ in layers}
    for name, module in layers:
        *path, last = name.split(".")
        if any(".".join(path[: depth + 1]) in names for depth in range(len(path))):
            continue  # a module that holds it is there itself
        container = chain
        for part in path:
            if part not in container._modules:
                inner = nn.Sequential()
                container.add_module(part, inner)
                containers.add(id(inner))
            held = container._modules[part]
            assert isinstance(held, nn.Sequential)
            container = held
        # Not add_module, which refuses the names of methods, as `pop`; models may have such.
        container._modules[last] = module
    return containers


def _order(prefix: str, chain: nn.Module, containers: set[int]) -> Iterator[str]:
    """Yield the names in the order in which nested containers call them."""
    for name, module in chain._modules.items():
        if module is not None and id(module) in containers:
            yield from _order(f"{prefix}{name}.", module, containers)
        else:
            yield f"{prefix}{name}"


def _new_name(layer: Callable[..., Any], taken: set[str]) -> str:
    """Return a name for what has none, after what it is: ``flatten``, ``flatten_2``."""
    if isinstance(layer, nn.Module):
        base = type(layer).__name__.lower()
    else:
        own = getattr(layer, "__name__", type(layer).__name__)
        base = "".join(letter for letter in own if letter.isalnum() or letter == "_") or "function"
    name, number = base, 1
    while name in taken or hasattr(nn.Sequential, name):
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def _layer_faults(where: str, model: nn.Module, layer: object) -> list[str]:
    if isinstance(layer, str):
        return _name_faults(where, model, layer)
    if isinstance(layer, nn.Module):
        if any(layer is module for module in model.modules()) or not _has_state(layer):
            return []
        kind = type(layer).__name__
        return [f"{where}: this {kind} has state and is no part of the model: make it one"]
    return function_faults(where, layer)


def _name_faults(where: str, model: nn.Module, name: str) -> list[str]:
    names = [known for known, _ in model.named_modules(remove_duplicate=False) if known]
    if name not in names:
        kind = type(model).__name__
        if name and hasattr(model, name):
            return [f"{where}: {name!r} of {kind} is no module: pass it as a function"]
        close = get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names[:8])}"
        return [f"{where}: {kind} has no module {name!r}: {hint}"]
    module = model.get_submodule(name)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        inner = next((known for known in names if known.startswith(f"{name}.")), None)
        hint = f"name what it holds, {inner!r}" if inner else "it is empty"
        return [f"{where}: {name!r} is {a_kind(module)}, nobody can call it: {hint}"]
    return []


def function_faults(where: str, function: object) -> list[str]:
    """Return why a function cannot stand in a chain: above all, for state nobody would find."""
    if isinstance(function, type):
        name = function.__name__
        return [f"{where}: wanted a module or a function, got the class {name}: write {name}()"]
    if not callable(function):
        return [f"{where}: wanted a module or a function, got {type(function).__name__}"]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [
            f"{where}: a method of {a_kind(owner)}, whose parameters nobody would find: "
            "pass the module itself"
        ]
    return [
        f"{where}: a function that uses {name}, {a_kind(value)} with parameters or "
        "buffers that nobody would find: pass the module itself, or a module that holds it"
        for name, value in _used_by(function)
        if _has_state(value)
    ]


def _used_by(function: Any) -> Iterator[tuple[str, object]]:
    """Yield what a function can reach by name: arguments of a partial, closure, globals."""
    if isinstance(function, partial):
        yield getattr(function.func, "__name__", "the partial's function"), function.func
        yield from ((f"argument {index}", value) for index, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _used_by(function.func)
        return
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that is still empty
            yield name, cell.cell_contents
    known = function.__globals__
    yield from ((name, known[name]) for name in code.co_names if name in known)


def _has_state(value: object) -> bool:
    if isinstance(value, nn.Module):
        trains = any(parameter.requires_grad for parameter in value.parameters())
        return trains or any(True for _ in value.buffers())
    return isinstance(value, nn.Parameter) and value.requires_grad
