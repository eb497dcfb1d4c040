"""Models whose values do not simply run from layer to layer, for the engine behind a recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 31
WIDTH = 8
Inputs = dict[str, Any]


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.inner(self.norm(x)))
        return x if scale is None else x * scale


class Stack(nn.Module):
    """Layers under one name; what lies between them is up to each model."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def result(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x)
        return result


class Skips(Stack):
    """The first value is used by every later stage, and once more by the last."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        for layer in self.layers:
            x = layer(x) + first
        return self.result(x * first)


class LateInputs(Stack):
    """Arguments that only late stages use; a mask made of sizes and of an argument."""

    def forward(self, x: Tensor, scale: Tensor, keep: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        x = self.stem(x)
        mask = torch.arange(rows, device=x.device).view(rows, 1) >= 0
        if keep is not None:
            mask = mask & keep.view(rows, 1)
        for layer in self.layers:
            x = layer(x, scale).masked_fill(~mask, 0.0)
        return self.result(x)


class EarlyOutputs(Stack):
    """All hidden values are part of the result, in a dict, beside numbers and None."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = [self.stem(x)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        logits = self.head(hidden[-1])
        return {"logits": logits, "hidden": tuple(hidden), "rows": x.shape[0], "none": None}


class InPlace(Stack):
    """Values changed in place after they were handed on, and views of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = x.clone()
        for layer in self.layers:
            x = layer(x) + 1.0
            x += 0.5
            kept[:, 0] = kept[:, 0] * 0.5
            x = F.relu_(x + kept)
        return self.result(x)


class Tied(Stack):
    """The first weight once more at the end, and one layer in the middle called twice."""

    def __init__(self) -> None:
        super().__init__(3)
        self.head = nn.Linear(WIDTH, 6, bias=False)
        self.head.weight = nn.Parameter(self.stem.weight.detach().t().contiguous())
        self.out = nn.Linear(6, WIDTH)
        self.out.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)
        result: Tensor = self.out(self.head(x))
        return result


class Regions(Stack):
    """A part without gradients, a value that is cut off, and a buffer that one stage updates."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.count += 1
        with torch.no_grad():
            frozen = self.layers[0](x) * 2
        x = self.layers[1](x + frozen)
        x = self.layers[2](x) + x.detach()
        return self.result(self.layers[3](x))


class Unused(Stack):
    """Parameters that nobody uses, and one that opened code uses directly."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.gain
        for layer in self.layers:
            x = layer(x)
        return self.result(x * self.gain)


class Draws(Stack):
    """Random numbers in opened code, in layers, and in one layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.block = nn.Sequential(Layer(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.stem(x), 0.1, self.training)
        for layer in self.layers:
            x = self.drop(layer(x)) + 0.1 * torch.randn_like(x)
        for _ in range(3):
            x = F.dropout(self.block(x) + x, 0.1, self.training)
        noise = torch.distributions.Normal(x.detach(), torch.ones_like(x), validate_args=False)
        return self.result(x + 0.1 * noise.sample())


class Inner(nn.Module):
    """Opened if a cut lies in it, else one call: what it draws must not depend on that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Layer(), nn.Dropout(0.2))
        self.second = nn.Sequential(Layer(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * torch.rand(x.shape[0], 1, device=x.device)
        x = self.second.forward(F.dropout(x, 0.1, self.training))  # not a call of the module
        return F.dropout(x, 0.1, self.training)


class DrawsInside(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        self.inner = Inner()
        self.unregistered = [nn.Sequential(nn.Tanh(), nn.Dropout(0.2))]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](F.dropout(self.stem(x), 0.1, self.training))
        x = self.inner(x) + self.inner(x + 1)
        x = self.unregistered[0](self.layers[1](x))
        return self.result(x + 0.1 * torch.randn_like(x))


@dataclass(frozen=True)
class Case:
    """A model, and how it is cut.

    Attributes:
        make: Builds the model.
        split: How it is cut.
        tied: Whether some gradient may differ in the last bits.
        late: Whether it takes the arguments of ``LateInputs``.
    """

    make: Callable[[], nn.Module]
    split: Any = 3
    tied: bool = False
    late: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self.make()

    def batch(self, rows: int, seed: int = 1) -> tuple[Inputs, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs: Inputs = {"x": torch.randn(rows, 6, generator=generator)}
        if self.late:
            inputs["scale"] = torch.rand(rows, WIDTH, generator=generator)
            inputs["keep"] = torch.rand(rows, generator=generator) > 0.3
        return inputs, torch.randn(rows, generator=generator)


CASES = {
    "skips": Case(Skips),
    "skips, a stage per layer": Case(Skips, {"layers.0": "end", "layers.2": "begin"}),
    "late inputs": Case(LateInputs, late=True),
    "early outputs": Case(EarlyOutputs),
    "in place": Case(InPlace),
    "tied": Case(Tied, tied=True),
    "regions": Case(Regions, ["layers.1", "layers.3"]),
    "unused parameters": Case(Unused, tied=True),
    "draws": Case(Draws, tied=True),
    "draws, a stage per call": Case(Draws, {"block": "end"}, tied=True),
    "draws inside": Case(DrawsInside, ["inner", "head"]),
    "draws inside, opened": Case(DrawsInside, {"inner.first": "end"}, tied=True),
}


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A loss that depends on every tensor of the result."""
    if isinstance(output, dict):
        loss: Tensor = sum(
            (value.mean() for value in output["hidden"]), output["logits"].sum(1).mean()
        )
        return loss + target.mean()
    return F.mse_loss(output.sum(dim=1), target)
