"""The stages that live in this process, under the names of the original model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from stageline.errors import StateError
from stageline.running.placeholder import Placeholder


class LoadedKeys(NamedTuple):
    """What ``load_state_dict`` could not match; both are empty when it was strict."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class HeldStage:
    """A stage of this process.

    Attributes:
        index: The stage.
        prefix: What its names begin with.
        original: The module as it was before ``wrap_stage``; it knows the original names.
        module: What runs.
        given: The user's own module, of which ``original`` is a copy where it has tied tensors.
    """

    index: int
    prefix: str
    original: nn.Module
    module: nn.Module
    given: nn.Module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.original.named_parameters():
            yield self.prefix + name, parameter
        for name, tensor in self.added().items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def added(self) -> dict[str, Tensor]:
        """Return what a wrapper has beyond the original; it bears names of its own."""
        if self.module is self.original:
            return {}
        known = {id(tensor) for tensor in (*self.original.parameters(), *self.original.buffers())}
        return {
            added_prefix(self.index) + name: tensor
            for name, tensor in self.module.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor) and id(tensor) not in known
        }


def added_prefix(index: int) -> str:
    """Return what the names of all that a wrapper added to a stage begin with."""
    return f"wrapper{index}."


@dataclass(frozen=True)
class HeldStages:
    """All stages of this process.

    Attributes:
        stages: Those held here.
        elsewhere: Names in a full state_dict that other processes are responsible for, or the
            beginnings of such names where only those are known.
        aliases: Other names of what is held here, each with the name under which a stage holds it.
        first_names: The first name in the model of a parameter that is held under a later one.
        shadows: Copies of tied tensors; they stand for another one that is held here too.
        order: Where in the model each parameter stands, if the whole model is known.
        placeholder: What optimizers are given if none of these stages has a trainable parameter;
            None if all stages are in this process.
    """

    stages: tuple[HeldStage, ...]
    elsewhere: frozenset[str] = frozenset()
    elsewhere_prefixes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    first_names: Mapping[str, str] = field(default_factory=dict)
    shadows: tuple[Tensor, ...] = ()
    order: Mapping[str, int] = field(default_factory=dict)
    placeholder: Placeholder | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each once, and the placeholder if none of them can be trained."""
        parameters = [parameter for _, parameter in self.named_parameters()]
        yield from parameters
        if self.placeholder is not None and not any(each.requires_grad for each in parameters):
            # A script that freezes all parameters and unfreezes some has frozen this one too.
            self.placeholder.requires_grad = True
            yield self.placeholder

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each once, in the model's own order: optimizers number them by it."""
        seen = {id(shadow) for shadow in self.shadows}
        found = {}
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[self.first_names.get(name, name)] = parameter
        if all(name in self.order for name in found):  # else a wrapper has made others of them
            found = dict(sorted(found.items(), key=lambda entry: self.order[entry[0]]))
        yield from found.items()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        seen = {id(shadow) for shadow in self.shadows}
        for stage in self.stages:
            for name, buffer in stage.original.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield stage.prefix + name, buffer

    def train(self, mode: bool) -> None:
        for stage in self.stages:
            stage.module.train(mode)
            stage.original.train(mode)
            stage.given.train(mode)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stages held here, under original names."""
        merged: OrderedDict[str, Any] = OrderedDict()
        versions: dict[str, Any] = {}
        for stage in self.stages:
            part = stage.original.state_dict(prefix=stage.prefix)
            merged.update(part)
            versions.update(_versions(part))
            merged.update({name: tensor.detach() for name, tensor in stage.added().items()})
        for alias, name in self.aliases.items():
            if name in merged:
                merged[alias] = merged[name]
        # Where torch keeps the format version of each module, for those that migrate old formats.
        merged._metadata = versions  # type: ignore[attr-defined]
        return merged

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> LoadedKeys:
        """Take what belongs to these stages out of a state_dict of the whole model.

        Nothing is loaded unless everything fits.
        """
        own = self.state_dict()
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own and not self._is_elsewhere(name)]
        faults = [
            f"{name} has shape {_shape(state[name])}, the model wants {_shape(value)}"
            for name, value in own.items()
            if name in state and _shape(state[name]) != _shape(value)
        ]
        if strict:
            faults += [f"{name} is missing" for name in missing]
            faults += [f"{name} is not part of the model" for name in unexpected]
        if faults:
            bullets = "".join(f"\n  - {fault}" for fault in faults)
            raise StateError(f"the state_dict does not fit, nothing was loaded:{bullets}")
        state = self._aligned(state)
        for stage in self.stages:
            stage.original.load_state_dict(_without_prefix(state, stage.prefix), strict=False)
            for name, tensor in stage.added().items():
                if name in state:
                    tensor.detach().copy_(state[name])
        return LoadedKeys(missing, unexpected)

    def _aligned(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state in which all names of a tensor have one value: the last, as in torch."""
        held = {**self.aliases, **{name: name for name in self.aliases.values()}}
        latest = {held[name]: value for name, value in state.items() if name in held}
        spread = {name: latest[holder] for name, holder in held.items() if holder in latest}
        aligned = OrderedDict({**state, **spread})
        aligned._metadata = _versions(state)  # type: ignore[attr-defined]
        return aligned

    def _is_elsewhere(self, name: str) -> bool:
        return name in self.elsewhere or name.startswith(self.elsewhere_prefixes)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _without_prefix(state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    part = OrderedDict(_cut_names(state, prefix))
    part._metadata = _cut_names(_versions(state), prefix)  # type: ignore[attr-defined]
    return part


def _cut_names(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    # Of the module "0." itself the version is kept under "0", without the dot.
    inside = {n[len(prefix) :]: value for n, value in state.items() if n.startswith(prefix)}
    own = {"": state[prefix[:-1]]} if prefix and prefix[:-1] in state else {}
    return {**own, **inside}


def _versions(state: Mapping[str, Any]) -> dict[str, Any]:
    return dict(getattr(state, "_metadata", None) or {})
