"""Modules that ``wrap_stage`` puts around a stage."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Doubled(nn.Module):
    """A wrapper without parameters, as DDP is one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x) * 2
