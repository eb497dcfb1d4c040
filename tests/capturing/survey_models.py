"""Small models for tests of the survey, and what was found in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.survey import Survey, survey

WIDTH = 4


class Block(nn.Module):
    """A layer as they stand in most models: two parts with parameters and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        x = x + self.linear(self.norm(x))
        return x if memory is None else x + memory


class Stack(nn.Module):
    """Blocks one after the other, in a ModuleList."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *memory: Tensor) -> Any:
        for block in self.blocks:
            x = block(x, *memory) * 1.0  # an operation of its own between the layers
        return x


class Model(nn.Module):
    """An input layer, a trunk and a head."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.stem, self.trunk, self.head = nn.Linear(2, WIDTH), trunk, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.trunk(self.stem(x)))


class Sum(Stack):
    """Parallel branches."""

    def forward(self, x: Tensor, *memory: Tensor) -> Any:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class Experts(nn.Module):
    """Each row goes to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(x)
        chosen = self.gate(hidden).argmax(-1)
        result = x.clone()
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            result.index_add_(0, rows, expert(hidden[rows]))
        return result


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(Block() for _ in range(2))
        self.decoder = Stack(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.decoder(x, self.encoder(x))


class Repeat(nn.Module):
    """One block, called several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.block, self.times = Block(), times

    def forward(self, x: Tensor) -> Any:
        for _ in range(self.times):
            x = self.block(x)
        return x


class Hidden(nn.Module):
    """Blocks in a plain list, which torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [Block() for _ in range(3)]

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def rows() -> Tensor:
    return torch.linspace(-1, 1, 12).view(6, 2)


def blocks(number: int) -> list[Block]:
    return [Block() for _ in range(number)]


def surveyed(model: nn.Module) -> Survey:
    return survey(model, (rows(),), {})


def families(found: Survey) -> list[list[str]]:
    return [[visit.path for visit in family.members] for family in found.families]


def chosen(model: nn.Module, num_stages: int | None = 2) -> tuple[list[str], list[str]]:
    choice = surveyed(model).choose(num_stages)
    return sorted(choice.opened), list(choice.members)


def numbered(name: str, number: int) -> list[str]:
    return [f"{name}.{index}" for index in range(number)]
