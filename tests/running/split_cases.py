"""Modules whose backward is hard to split, each as the middle stage of three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Square(torch.autograd.Function):
    """Counts how often its backward runs."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Square.calls += 1
        x, weight = ctx.saved_tensors
        gradient = gradients[0].float()
        return 2 * x * (gradient @ weight.t()), (x * x).t() @ gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Square.apply
        out: Tensor = apply(self.before(x).float(), self.weight)
        return out


class OneWeight(nn.Module):
    """One weight in several calls."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class Products(nn.Module):
    """The product of a weight with itself, and every way to write a product."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.v = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ (self.w @ self.w) / WIDTH
        x = torch.addmm(self.b, x, self.v.t())
        x = torch.einsum("bi,oi->bo", x, self.w) / WIDTH
        x = (self.v @ x.t()).t() + x.matmul(self.w).mul_(self.b)
        x = torch.bmm(x.unsqueeze(0), self.v.expand(1, -1, -1)).squeeze(0)
        out: Tensor = torch.tensordot(x.float(), self.w, dims=([1], [0]))
        return out / WIDTH


class Mixed(nn.Module):
    """A weight that is deferred here and not there, four times over."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.w)
        x = x * self.w[0] + self.w.sum(0)
        x = F.linear(torch.tanh(x), self.w)
        return x + self.w.mean()


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.PReLU(), nn.GroupNorm(2, WIDTH)
        )
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        out += self.bias
        return out


class Checkpointed(nn.Module):
    """Counts how often what is checkpointed runs forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant
        self.calls = 0

    def _inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._inner, self.first(x), use_reentrant=self.reentrant)
        return out


class OffPath(nn.Module):
    """A parameter that reaches the output without touching the input, and one that is it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Embedding(3, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place = self.linear(self.positions(torch.tensor([1])))
        return self.linear(x) + place, self.scale, torch.tanh(self.scale) * 2


class TakesThree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, scale, other = value
        out: Tensor = self.linear(x) * scale + other
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(x.unsqueeze(1).expand(-1, 3, -1))[0]
        return out.sum(1)


class Images(nn.Module):
    """Convolutions of several kinds around a BatchNorm, in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 1, groups=2),
            nn.ConvTranspose2d(4, 2, 2),
            nn.AvgPool2d(2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        x = F.interpolate(x, scale_factor=2)
        out: Tensor = self.body(x)
        return out.flatten(1)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, kdim=4, vdim=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.unsqueeze(0)).squeeze(0)
        out: Tensor = self.cross(x, x[:, :4], x[:, 4:])[0]
        return out


class Expanded(nn.Module):
    """The gradient of its output is one number for all: a stride of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.t().contiguous().t())
        z: Tensor = self.linear(x)[:, ::2]
        return x + y.sum() + z.repeat_interleave(2, 1)


class Penalised(nn.Module):
    """Differentiates inside its forward, twice over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        y = torch.tanh(self.linear(x))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


class ChangesInPlace(nn.Module):
    """Weights computed in place, with and without an activation in them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        w = self.w * 2
        w[0] = 1.0
        x = x.relu_() @ w
        v = self.w.clone()
        v.mul_(x.mean())
        v[1] = x[0]
        return x @ v + F.linear(x, w, None)


class Loaded(nn.Module):
    """Reads a parameter through .data and .detach(): no gradient, as without us."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = self.linear.weight.norm()
        out: Tensor = self.linear(x) / norm + F.linear(x, self.linear.weight.detach())
        return out


def weight_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Tanh(),
        nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    )


def frozen_in_part() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return module


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "w @ w, and products of every kind": Products,
    "custom Function": Custom,
    "LayerNorm and bias": Norms,
    "checkpoint, non-reentrant": lambda: Checkpointed(reentrant=False),
    "checkpoint, reentrant": lambda: Checkpointed(reentrant=True),
    "parameter off the path": OffPath,
    "weight_norm": weight_norm,
    "GRU": Recurrent,
    "in-place ReLU": lambda: nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
    ),
    "conv and BatchNorm, channels_last": Images,
    "attention": Attention,
    "attention with dropout": lambda: Attention(0.2),
    "one weight twice": lambda: OneWeight(2),
    "one weight three times": lambda: OneWeight(3),
    "one weight deferred and not": Mixed,
    "expanded and transposed gradients": Expanded,
    "frozen in part": frozen_in_part,
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "differentiates inside": Penalised,
    "changes weights in place": ChangesInPlace,
    "reads weights without a gradient": Loaded,
}


def stages_of(name: str, *, frozen_input: bool = False) -> list[nn.Module]:
    """Return three stages, the second of them hard to split."""
    torch.manual_seed(5)
    last = TakesThree() if name == "parameter off the path" else nn.Linear(WIDTH, WIDTH)
    stages = [nn.Linear(WIDTH, WIDTH), MIDDLES[name](), last]
    if frozen_input:
        stages[0].requires_grad_(False)
    return stages
