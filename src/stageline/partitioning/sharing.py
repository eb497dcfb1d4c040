"""Parameters and buffers that several stages hold: found by the memory they lie in.

Two stages that hold the same memory in the same shape are *tied*: the tensor is one, whatever its
names and however many Parameters lie over it. Views that differ are refused: a gradient of the one
would have to be cut and turned before it could be added to that of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_Memory = tuple[bool, int]  # whether the number is an address, or the identity of the tensor
_Place = tuple[_Memory, int, int]  # which memory, first byte, byte after the last


@dataclass(frozen=True)
class Holder:
    """One name under which one stage holds a tensor.

    Attributes:
        stage: The stage.
        name: The name in the model.
        tensor: The parameter or buffer.
        module: The module whose own it is.
        key: Its name there.
    """

    stage: int
    name: str
    tensor: Tensor
    module: nn.Module
    key: str

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)


@dataclass(frozen=True)
class Shared:
    """A tensor that several stages hold, under all of its names, the first one first."""

    holders: tuple[Holder, ...]

    @property
    def name(self) -> str:
        return self.holders[0].name

    @property
    def is_parameter(self) -> bool:
        return self.holders[0].is_parameter

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that hold it, in forward order."""
        return tuple(sorted({holder.stage for holder in self.holders}))


def find_shared(stages: Sequence[tuple[int, str, nn.Module]]) -> tuple[list[Shared], list[str]]:
    """Return what several stages hold, and a finding for all of it that cannot be run.

    Args:
        stages: Index, beginning of all names, and module of every stage that is known here.

    Example:
        >>> tied = nn.Linear(2, 2, bias=False)
        >>> (shared,), faults = find_shared([(0, "0.", tied), (2, "2.", tied)])
        >>> shared.stages, [holder.name for holder in shared.holders], faults
        ((0, 2), ['0.weight', '2.weight'], [])
    """
    found = [holder for stage in stages for holder in _holders(*stage)]
    placed = sorted((_place(holder.tensor), position) for position, holder in enumerate(found))
    groups = [sorted(group) for group in _overlapping(placed)]
    all_shared = [Shared(tuple(found[position] for position in group)) for group in sorted(groups)]
    several = [shared for shared in all_shared if len(shared.stages) > 1]
    return several, [finding for shared in several for finding in _faults(shared)]


def _holders(stage: int, prefix: str, module: nn.Module) -> Iterator[Holder]:
    # In the order of a state_dict. A module that stands twice has two names for all it holds.
    for path, inner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}{path}." if path else prefix
        own = (
            *inner.named_parameters(recurse=False, remove_duplicate=False),
            *inner.named_buffers(recurse=False, remove_duplicate=False),
        )
        for key, tensor in own:
            yield Holder(stage, start + key, tensor, inner, key)


def _place(tensor: Tensor) -> _Place:
    """Return where a tensor lies; neighbours in one flat vector do not overlap."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return (False, id(tensor)), 0, 1
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    memory = (True, int(tensor.untyped_storage().data_ptr()))
    return memory, first, first + int(span) * tensor.element_size()


def _overlapping(placed: Sequence[tuple[_Place, int]]) -> list[list[int]]:
    """Group the positions of what overlaps; the input is sorted by place."""
    groups: list[list[int]] = []
    memory, end = None, 0
    for (here, first, last), position in placed:
        if here == memory and first < end:
            groups[-1].append(position)
            end = max(end, last)
        else:
            groups.append([position])
            memory, end = here, last
    return groups


def _faults(shared: Shared) -> list[str]:
    """Return why a shared tensor cannot be run, if so."""
    if len({_view(holder.tensor) for holder in shared.holders}) > 1:
        return [
            f"{_who(shared)}, but these are different views of one memory: put both into one "
            "stage, or let both use the same Parameter"
        ]
    if len({holder.is_parameter for holder in shared.holders}) > 1:
        return [
            f"{_who(shared)}, here as a parameter and there as a buffer: put both into one stage, "
            "or let both use the same Parameter"
        ]
    if len({holder.tensor.requires_grad for holder in shared.holders}) > 1:
        return [f"{_who(shared)}, but only one of them requires a gradient: freeze both or neither"]
    first = shared.holders[0]
    trained = any(keeps_statistics(holder.module) for holder in shared.holders)
    if trained and first.key == "running_mean":  # one finding for each module
        return [
            f"{type(first.module).__name__} is trained by two stages ({_who(shared)}), and its "
            "statistics would depend on who comes first: put both into one stage, give each its "
            "own, or call eval() on it"
        ]
    return []


def _view(tensor: Tensor) -> object:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def keeps_statistics(module: nn.Module) -> bool:
    """Whether calling a module, a BatchNorm or one like it, would change its buffers.

    One that changes them after a call, and not in its ``forward``, says so: ``defers_statistics``.
    """
    defers = getattr(module, "defers_statistics", False)
    return module.training and not defers and bool(getattr(module, "track_running_stats", False))


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm, or one like it; InstanceNorm normalises each row alone."""
    return hasattr(module, "track_running_stats") and not isinstance(module, _INSTANCE_NORMS)


def normalises_batches(module: nn.Module) -> bool:
    """Whether a module holds a BatchNorm that normalises by what it is given.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> normalises_batches(model), normalises_batches(model.eval())
        (True, False)
    """
    norms = filter(is_batch_norm, module.modules())
    return any(norm.training or norm.running_mean is None for norm in norms)


def _who(shared: Shared) -> str:
    names: dict[int, str] = {}
    for holder in shared.holders:
        names.setdefault(holder.stage, holder.name)
    held = " and by ".join(f"stage {stage} as {name}" for stage, name in names.items())
    first = shared.holders[0]
    size = " x ".join(map(str, first.tensor.shape)) or "one number"
    return f"{first.key} of {size} is held by {held}"
