"""Layers with skip connections: ``yield stash(name, tensor)`` here, ``yield pop(name)`` there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from stageline.compat.fairscale.nn.pipe.skip.carrying import SkipKey, current_skips
from stageline.compat.fairscale.nn.pipe.skip.namespace import Namespace

_Self = TypeVar("_Self", bound="Skippable")


class stash:
    """The command ``yield stash(name, tensor)``: keep a tensor, or None, for a later layer."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """The command ``tensor = yield pop(name)``: take what an earlier layer has stashed."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """A layer whose ``forward`` yields ``stash`` and ``pop``; made by :func:`skippable`.

    Attributes:
        module: The layer as it was written.
        namespaces: The namespace of each name that was isolated.
    """

    draws_nothing = True  # no random numbers; its module answers for itself

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> SkipKey:
        """Return a name together with its namespace, if it has one."""
        return self.namespaces.get(name), name

    def stashable(self) -> list[SkipKey]:
        """Return what this layer stashes."""
        return [self.namespaced(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[SkipKey]:
        """Return what this layer pops."""
        return [self.namespaced(name) for name in sorted(self.poppable_names)]

    def isolate(self: _Self, ns: Namespace, *, only: Iterable[str] | None = None) -> _Self:
        """Put names into a namespace, apart from the same names elsewhere in the model.

        Args:
            ns: The namespace.
            only: The names to isolate; all of this layer if left out.

        Returns:
            This layer itself.
        """
        names = self.stashable_names | self.poppable_names if only is None else set(only)
        self.namespaces.update((name, ns) for name in names)
        return self

    def forward(self, input: Any) -> Any:
        skips = current_skips()
        for key in self.poppable():
            if key not in skips:
                raise RuntimeError(f"'{key[1]}' has not been stashed")
        popped = {key[1]: skips.pop(key) for key in self.poppable()}
        stashed: dict[str, Tensor | None] = {}

        def handle_stash(name: str, tensor: Tensor | None) -> None:
            if name not in self.stashable_names:
                raise RuntimeError(f"'{name}' has not been declared as stashable")
            stashed[name] = tensor

        def handle_pop(name: str) -> Tensor | None:
            if name not in self.poppable_names:
                raise RuntimeError(f"'{name}' has not been declared as poppable")
            if name not in popped:
                raise RuntimeError(f"'{name}' has been popped before")
            return popped.pop(name)

        output = self.dispatch(input, handle_stash, handle_pop)
        _refuse_left("stashed", self.stashable_names - stashed.keys())
        _refuse_left("popped", popped)
        skips.update((key, stashed[key[1]]) for key in self.stashable())
        return output

    def dispatch(
        self,
        input: Any,
        handle_stash: Callable[[str, Tensor | None], None],
        handle_pop: Callable[[str], Tensor | None],
    ) -> Any:
        """Run the layer, and call a function for each command that it yields; return its output."""
        generator = self.module(input)
        if not isinstance(generator, Generator):
            return generator  # it yields nothing
        answer: Tensor | None = None
        while True:
            try:
                command = generator.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(command, stash):
                answer = None
                handle_stash(command.name, command.tensor)
            elif isinstance(command, pop):
                answer = handle_pop(command.name)
            else:
                raise TypeError(f"{command!r} is not a command from @skippable")


def _refuse_left(done: str, names: Iterable[str]) -> None:
    left = ", ".join(f"'{name}'" for name in sorted(names))
    if left:
        raise RuntimeError(f"{left} must be {done} but have not")


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare a layer with skip connections; it works with a Pipe and without one.

    Example:
        >>> import torch
        >>> from stageline.compat.fairscale.nn.pipe.skip import pop, skippable, stash
        >>> @skippable(stash=["input"])
        ... class Double(nn.Module):
        ...     def forward(self, input):
        ...         yield stash("input", input)
        ...         return 2 * input
        >>> @skippable(pop=["input"])
        ... class Add(nn.Module):
        ...     def forward(self, input):
        ...         skip = yield pop("input")
        ...         return input + skip
        >>> nn.Sequential(Double(), Add())(torch.ones(1))
        tensor([3.])

    Args:
        stash: The names that its ``forward`` stashes.
        pop: The names that its ``forward`` pops.
    """
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def extend(module_cls: type[nn.Module]) -> type[Skippable]:
        about = {"__doc__": module_cls.__doc__, "__module__": module_cls.__module__}
        return type(module_cls.__name__, (Skippable,), {"module_cls": module_cls, **names, **about})

    return extend


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip tensor is stashed by one layer and popped by one later layer.

    Raises:
        TypeError: Some are not; every finding at once.
    """
    findings: list[str] = []
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    for name, layer in module.named_children():
        if isinstance(layer, Skippable):
            findings += _pair(name, layer, stashed, popped)
    findings += [
        f"no module declared '{name}' as poppable but stashed"
        for name in sorted(key[1] for key in stashed - popped)
    ]
    if findings:
        bullets = "\n".join(f"* {finding}" for finding in findings)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{bullets}")


def _pair(child: str, layer: Skippable, stashed: set[SkipKey], popped: set[SkipKey]) -> list[str]:
    """Note what a layer stashes and pops; return what does not fit to the layers before."""
    both = layer.stashable_names & layer.poppable_names
    findings = [
        f"'{child}' declared '{name}' both as stashable and as poppable" for name in sorted(both)
    ]
    again = "but not isolated by namespace"
    for key in layer.stashable():
        if key[1] not in both and key in stashed:
            findings.append(f"'{child}' redeclared '{key[1]}' as stashable {again}")
        elif key[1] not in both:
            stashed.add(key)
    for key in layer.poppable():
        if key[1] in both:
            continue
        if key in popped:
            findings.append(f"'{child}' redeclared '{key[1]}' as poppable {again}")
        elif key not in stashed:
            findings.append(f"'{child}' declared '{key[1]}' as poppable but it was not stashed")
        else:
            popped.add(key)
    return findings
