"""The blocks of a model: the smallest pieces that can be placed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Block:
    """One piece of a model.

    Attributes:
        name: Its name in the model, ``encoder.3``.
        module: The user's own module.
    """

    name: str
    module: nn.Module

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def __str__(self) -> str:
        return f"{self.name} {type(self.module).__name__}"


@dataclass(frozen=True)
class Graph:
    """The blocks of a model in forward order; each takes what the one before returned."""

    blocks: tuple[Block, ...]

    def stage_module(self, first: int, stop: int) -> nn.Sequential:
        """Return the blocks ``first`` to ``stop - 1`` as one module, under their original names."""
        stage = nn.Sequential()
        for block in self.blocks[first:stop]:
            container, parts = stage, block.name.split(".")
            for part in parts[:-1]:
                if part not in container._modules:
                    container.add_module(part, nn.Sequential())
                inner = container._modules[part]
                assert isinstance(inner, nn.Sequential)
                container = inner
            container.add_module(parts[-1], block.module)
        return stage
