"""Real modules that run on meta.

A process makes only its own stages real of a model on meta. What it records later runs through all
of them: from a module on meta come values without numbers, and a real module cannot take them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from stageline.torch_private import DisableTorchFunction


@contextmanager
def without_numbers(module: nn.Module) -> Iterator[None]:
    """Let a module hold tensors on meta in place of its real ones.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 3)
        >>> with without_numbers(layer):
        ...     layer(torch.empty(4, 2, device="meta")).shape
        torch.Size([4, 3])
        >>> layer.weight.is_meta
        False
    """
    twins: dict[int, Tensor] = {}
    held = [
        (table, name, tensor)
        for each in module.modules()
        for table in (each._parameters, each._buffers)
        for name, tensor in table.items()
        if tensor is not None and not tensor.is_meta
    ]
    try:
        with DisableTorchFunction():  # it is not the model that makes these
            for table, name, tensor in held:
                twin = twins.setdefault(id(tensor), _on_meta(tensor))
                table[name] = twin  # type: ignore[assignment]  # of the same kind
        yield
    finally:
        for table, name, tensor in held:
            table[name] = tensor  # type: ignore[assignment]  # what it was


def _on_meta(tensor: Tensor) -> Tensor:
    twin = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin
