"""Parameters and buffers that several stages use: found by their storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def find_shared(stages: Sequence[tuple[int, nn.Module]]) -> list[str]:
    """Return a finding for every tensor that two stages hold.

    Example:
        >>> tied = nn.Linear(2, 2)
        >>> find_shared([(0, nn.Sequential(tied)), (1, nn.Sequential(nn.ReLU(), tied))])[0][:62]
        'weight of 2 x 2 is held by stage 0 as 0.weight and by stage 1 '
    """
    holders: dict[int, dict[int, str]] = {}
    shapes: dict[int, Tensor] = {}
    for index, module in stages:
        for name, tensor in _tensors(module).items():
            # By address, not by storage: neighbours in one flat vector are not tied.
            has_address = tensor.layout is torch.strided and not tensor.is_meta
            key = tensor.data_ptr() if has_address else id(tensor)
            if tensor.numel():
                holders.setdefault(key, {}).setdefault(index, name)
                shapes.setdefault(key, tensor)
    return [_finding(shapes[key], names) for key, names in holders.items() if len(names) > 1]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _finding(tensor: Tensor, names: Mapping[int, str]) -> str:
    held = " and by ".join(f"stage {index} as {name}" for index, name in names.items())
    last_part = next(iter(names.values())).rsplit(".", 1)[-1]
    size = " x ".join(map(str, tensor.shape))
    return f"{last_part} of {size} is held by {held}: put both into one stage"
