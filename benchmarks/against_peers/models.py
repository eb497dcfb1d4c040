"""What is trained: six models, each with its batch, its loss and where it is cut.

Only torch is imported here, for this file also runs in the environments of the peers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 0
CHECKED = 3  # steps whose losses are compared: the second depends on the gradients of the first
Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and the batch it is trained on.

    Attributes:
        letter: What it is called for short.
        title: What it is.
        make: Builds the model, with this much dropout.
        draw: Makes a batch of so many rows.
        loss: Compares the output of some rows with their targets; a mean.
        rows: Of a microbatch.
        num_microbatches: Of a step.
        cuts: Layers per stage, by the number of stages.
        steps: How many steps a turn has: a few tenths of a second.
        laps: How many turns the yardsticks make of these steps, one after the other.
        rounds: Of a race, unless somebody asks for more or fewer.
        rate: Of SGD: large enough that a missing gradient shows in the next loss.
        dropout: While timed; nothing is dropped while results are compared.
        each: What to split at for a stage per call of a module, where a module is called again.
    """

    letter: str
    title: str
    make: Callable[[float], nn.Module]
    draw: Callable[[int], Batch]
    loss: Loss
    rows: int
    num_microbatches: int
    cuts: dict[int, list[int]]
    steps: int
    laps: int = 4
    rounds: int = 10
    rate: float = 0.05
    dropout: float = 0.0
    each: str | None = None

    def model(self, dropout: float) -> nn.Module:
        torch.manual_seed(SEED)
        return self.make(dropout)

    def layers(self, dropout: float, *, tied: bool = True) -> nn.Sequential:
        """Return the model as a list of layers, which is what most peers ask for.

        Args:
            dropout: How much of it.
            tied: Whether a block that is called again is the same block, or a copy of it.
        """
        model = self.model(dropout)
        if isinstance(model, nn.Sequential):
            return model
        assert isinstance(model, IterativeNetwork)
        return model.unrolled(tied=tied)

    def batch(self) -> Batch:
        torch.manual_seed(SEED + 1)
        return self.draw(self.rows * self.num_microbatches)

    def microbatches(self) -> list[Batch]:
        x, y = self.batch()
        return list(zip(x.split(self.rows), y.split(self.rows), strict=True))


def linear(width: int) -> nn.Linear:
    """Return a layer through which activations and gradients keep their size: all matter then."""
    layer = nn.Linear(width, width)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def stack(width: int) -> Callable[[float], nn.Module]:
    """Return what builds 8 times Linear and ReLU."""

    def make(dropout: float) -> nn.Module:
        pairs = [(linear(width), nn.ReLU()) for _ in range(8)]
        return nn.Sequential(*(layer for pair in pairs for layer in pair))

    return make


def vectors(width: int) -> Callable[[int], Batch]:
    return lambda rows: (torch.randn(rows, width), torch.randn(rows, width))


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self, words: int, places: int, width: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(places, width) * 0.02)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.dropout(self.words(tokens) + self.places)
        return embedded


class Layer(nn.Module):
    """A layer of a GPT: attention to what came before, then a network of two matrices."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_output = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.before_attention(x)))
        hidden = F.gelu(self.widen(self.before_network(x)))
        added: Tensor = x + self.dropout(self.narrow(hidden))
        return added

    def attend(self, x: Tensor) -> Tensor:
        rows, places, width = x.shape
        qkv = self.to_qkv(x).view(rows, places, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.to_output(mixed.transpose(1, 2).reshape(rows, places, width))
        return output


WORDS, PLACES = 512, 128


def gpt(dropout: float) -> nn.Module:
    width = 256
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS))
    layers = [Layer(width, 4, dropout) for _ in range(8)]
    return nn.Sequential(Embedding(WORDS, PLACES, width, dropout), *layers, head)


def sentences(rows: int) -> Batch:
    tokens = torch.randint(WORDS, (rows, PLACES + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def next_word(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(wide)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or narrow != wide:
            shortcut = nn.Conv2d(narrow, wide, 1, stride, bias=False)
            self.around = nn.Sequential(shortcut, nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.around(x))


def resnet(dropout: float) -> nn.Module:
    """Return a ResNet-18 whose first layers have 16 channels instead of 64."""
    widths = [16, 32, 64, 128]
    stem = nn.Sequential(
        nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    )
    blocks = [
        block
        for before, width in zip([widths[0], *widths], widths, strict=False)
        for block in (
            Residual(before, width, 1 if before == width else 2),
            Residual(width, width, 1),
        )
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return nn.Sequential(stem, *blocks, head)


def pictures(rows: int) -> Batch:
    return torch.randn(rows, 3, 64, 64), torch.randint(10, (rows,))


class IterationBlock(nn.Module):
    """What is done again and again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = linear(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.lin(x))


class Again(nn.Module):
    """One more call of a block; a module of its own, since peers refuse a module that repeats."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x)
        return output


class IterativeNetwork(nn.Module):
    """A loop over one block, then a projection."""

    def __init__(self, width: int, num_iterations: int) -> None:
        super().__init__()
        self.num_iterations = num_iterations
        self.iter_block = IterationBlock(width)
        self.output_proj = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_iterations):
            x = self.iter_block(x)
        output: Tensor = self.output_proj(x)
        return output

    def unrolled(self, *, tied: bool) -> nn.Sequential:
        blocks = [
            Again(self.iter_block if tied else copy.deepcopy(self.iter_block))
            for _ in range(self.num_iterations)
        ]
        return nn.Sequential(*blocks, self.output_proj)


def labelled(rows: int) -> Batch:
    return torch.randn(rows, 512), torch.randint(10, (rows,))


HALVES_OF_16 = {2: [8, 8], 4: [4, 4, 4, 4]}
HALVES_OF_10 = {2: [5, 5], 4: [3, 2, 2, 3]}

_CASES = (
    Case(
        letter="a",
        title="8 Linear and ReLU, width 64; 8 microbatches of 8 rows",
        make=stack(64),
        draw=vectors(64),
        loss=F.mse_loss,
        rows=8,
        num_microbatches=8,
        cuts=HALVES_OF_16,
        steps=40,
    ),
    Case(
        letter="b",
        title="8 Linear and ReLU, width 256; 16 microbatches of 32 rows",
        make=stack(256),
        draw=vectors(256),
        loss=F.mse_loss,
        rows=32,
        num_microbatches=16,
        cuts=HALVES_OF_16,
        steps=12,
    ),
    Case(
        letter="c",
        title="8 Linear and ReLU, width 1024; 16 microbatches of 256 rows",
        make=stack(1024),
        draw=vectors(1024),
        loss=F.mse_loss,
        rows=256,
        num_microbatches=16,
        cuts=HALVES_OF_16,
        steps=1,
        laps=1,
        rounds=5,
    ),
    Case(
        letter="d",
        title="GPT, 8 layers, width 256, dropout 0.1; 8 microbatches of 4 x 128 tokens",
        make=gpt,
        draw=sentences,
        loss=next_word,
        rows=4,
        num_microbatches=8,
        cuts=HALVES_OF_10,
        steps=1,
        laps=1,
        rounds=5,
        dropout=0.1,
    ),
    Case(
        letter="e",
        title="ResNet-18, a quarter as wide; 8 microbatches of 4 pictures of 64 x 64",
        make=resnet,
        draw=pictures,
        loss=F.cross_entropy,
        rows=4,
        num_microbatches=8,
        cuts=HALVES_OF_10,
        steps=8,
        rate=0.001,
    ),
    Case(
        letter="f",
        title="one block, width 512, called 7 times in a loop; 16 microbatches of 64 rows",
        make=lambda dropout: IterativeNetwork(512, 7),
        draw=labelled,
        loss=F.cross_entropy,
        rows=64,
        num_microbatches=16,
        cuts={2: [4, 4], 4: [2, 2, 2, 2], 8: [1] * 8},
        steps=8,
        each="iter_block",
    ),
)
CASES = {case.letter: case for case in _CASES}
