"""Models that the tests of PiPPy's door cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stageline.compat.pippy import pipe_split

WIDTH = 8


class IterationBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.lin(x))


class IterativeNetwork(nn.Module):
    """Calls one block several times, as the unrolling example does."""

    def __init__(self, width: int = WIDTH, num_iters: int = 3) -> None:
        super().__init__()
        self.num_iters = num_iters
        self.iter_block = IterationBlock(width)
        self.output_proj = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_iters):
            x = self.iter_block(x)
        output: Tensor = self.output_proj(x)
        return output


class Layers(nn.Module):
    """A stack of layers, with a module list, as language models have it."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(IterationBlock(WIDTH) for _ in range(count))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x).mean(1)
        return output


class Split(nn.Module):
    """Says itself where it is cut; a later stage uses what an earlier one made, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        x = self.first(x) @ self.weight
        skip = x
        pipe_split()
        x = torch.relu(x @ self.weight) * mask
        pipe_split()
        output: Tensor = self.last(x + skip) * scale
        return output


class Nested(nn.Module):
    """The marks stand in a submodule that is called twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin0 = nn.Linear(WIDTH, WIDTH)
            self.lin1 = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, constant: Any = None) -> Tensor:
            x = self.lin0(x)
            pipe_split()
            x = torch.relu(self.lin1(x))
            return x if constant is None else x + constant

    def __init__(self) -> None:
        super().__init__()
        self.block0 = Nested.Block()
        self.block1 = Nested.Block()

    def forward(self, x: Tensor, constant: Any = None) -> Tensor:
        x = self.block0(x, constant=constant)
        pipe_split()
        output: Tensor = self.block1(x, constant=constant)
        return output


class Untied(nn.Module):
    """Layers that share nothing: gradients are the plain model's to the last bit."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
