"""Parameters and buffers that several stages use: found by the memory they lie in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

_Place = tuple[int, int, int]  # which memory, first byte, byte after the last
_Held = tuple[_Place, int, int, str, Tensor]  # place, order of discovery, stage, name, tensor


def find_shared(stages: Sequence[tuple[int, nn.Module]]) -> list[str]:
    """Return a finding for every tensor that two stages hold.

    Example:
        >>> tied = nn.Linear(2, 2)
        >>> find_shared([(0, nn.Sequential(tied)), (1, nn.Sequential(nn.ReLU(), tied))])[0][:62]
        'weight of 2 x 2 is held by stage 0 as 0.weight and by stage 1 '
    """
    found = (
        (index, name, tensor)
        for index, module in stages
        for name, tensor in _tensors(module).items()
        if tensor.numel()
    )
    held = [(_place(entry[2]), order, *entry) for order, entry in enumerate(found)]
    groups = [sorted(group, key=_order) for group in _overlapping(sorted(held, key=_by_place))]
    findings = []
    for group in sorted(groups, key=lambda group: _order(group[0])):
        names: dict[int, str] = {}
        for _, _, index, name, _ in group:
            names.setdefault(index, name)
        if len(names) > 1:
            findings.append(_finding(group[0][-1], names))
    return findings


def _by_place(one: _Held) -> _Place:
    return one[0]


def _order(one: _Held) -> int:
    return one[1]


def _place(tensor: Tensor) -> _Place:
    """Return where a tensor lies; neighbours in one flat vector do not overlap."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return id(tensor), 0, 1
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), first, first + int(span) * tensor.element_size()


def _overlapping(held: Sequence[_Held]) -> list[list[_Held]]:
    """Group what overlaps; the input is sorted by place."""
    groups: list[list[_Held]] = []
    memory, end = -1, 0
    for one in held:
        (here, first, last), *_ = one
        if here == memory and first < end:
            groups[-1].append(one)
            end = max(end, last)
        else:
            groups.append([one])
            memory, end = here, last
    return groups


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _finding(tensor: Tensor, names: Mapping[int, str]) -> str:
    held = " and by ".join(f"stage {index} as {name}" for index, name in names.items())
    last_part = next(iter(names.values())).rsplit(".", 1)[-1]
    size = " x ".join(map(str, tensor.shape))
    return f"{last_part} of {size} is held by {held}: put both into one stage"
