"""GPipe: the Pipe of ``compat.fairscale`` under its first name."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from stageline.compat.fairscale.nn.pipe import splitting
from stageline.compat.fairscale.nn.pipe.pipe import Pipe

__all__ = ["GPipe"]


class GPipe(Pipe):
    """A Pipe; layers that share a parameter are refused, as in torchgpipe.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> model = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=2)
        >>> model(torch.randn(8, 4)).shape
        torch.Size([8, 1])
    """

    _called: ClassVar[str] = "GPipe"
    _home: ClassVar[str] = "stageline.compat.torchgpipe"

    def _verify(self, module: nn.Sequential) -> None:
        verify_module(module)


def verify_module(module: nn.Sequential) -> None:
    """Check that a model can be split into partitions.

    Raises:
        TypeError: It is no ``nn.Sequential``.
        ValueError: It holds the same layer twice, or two layers share a parameter.
    """
    splitting.verify_module(module)
    in_children = sum(len(list(child.parameters())) for child in module.children())
    if len(list(module.parameters())) != in_children:
        raise ValueError("module with duplicate parameters in distinct children is not supported")
