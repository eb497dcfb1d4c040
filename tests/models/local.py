"""Models as users write them: no Sequential, long skips, routing by data, recurrence, ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.inputs import Inputs, Maker, Shape

NUM_CLASSES = 10
WORDS = 40


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or width != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """Residual blocks with BatchNorm, additions and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.layer3 = nn.Sequential(Residual(16, 32, 2), Residual(32, 32))
        self.fc = nn.Linear(32, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer3(self.layer2(self.layer1(x)))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        logits: Tensor = self.fc(x)
        return logits


class DoubleConv(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.GroupNorm(2, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv2(F.silu(self.conv1(x)))))


class UNet(nn.Module):
    """What goes in at the top of the U comes out at its other end: skips over all stages."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 16, 32)) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            DoubleConv(width, out) for width, out in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(
            DoubleConv(deep + wide, wide)
            for deep, wide in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        mask: Tensor = self.head(x)
        return mask


class Experts(nn.Module):
    """Each token goes to its two best experts; which ones only the data says."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(tokens).softmax(dim=-1).topk(2, dim=-1)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, ranks = torch.where(chosen == index)
            if rows.numel() == 0:
                continue
            result.index_add_(0, rows, expert(tokens[rows]) * weights[rows, ranks, None])
        return result.view_as(x)


class ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.moe = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.moe(self.norm(x))
        return out


class MixtureOfExperts(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(ExpertBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


class Recurrent(nn.Module):
    """Four GRU layers, each a module of its own that returns outputs and state."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(depth))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, states = self.embed(ids), []
        for layer in self.layers:
            x, state = layer(self.drop(x))
            states.append(state.transpose(0, 1))
        return self.head(x[:, -1]), states


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        out: Tensor = x + self.fall(F.gelu(self.rise(self.norm2(x))))
        return out


class TiedGPT(nn.Module):
    """The output layer is the embedding; the model computes its own loss."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, width)
        self.wpe = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Attention(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


class IterationBlock(nn.Module):
    def __init__(self, d_hid: int) -> None:
        super().__init__()
        self.lin = nn.Linear(d_hid, d_hid)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        return torch.relu(x)


class IterativeNetwork(nn.Module):
    """One block applied again and again: every use may be a stage of its own."""

    def __init__(self, d_hid: int = 16, num_iters: int = 3) -> None:
        super().__init__()
        self.num_iters = num_iters
        self.iter_block = IterationBlock(d_hid)
        self.output_proj = nn.Linear(d_hid, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_iters):
            x = self.iter_block(x)
        logits: Tensor = self.output_proj(x)
        return logits


@dataclass(frozen=True)
class Local:
    """A model written here, with the same face as an entry of the zoo."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Maker
    other_length: int | None = None
    computes_loss: bool = False
    masks: bool = False
    pads: str = "right"

    def build(self, *, dropout: bool = True) -> nn.Module:
        """Return the model in train mode; with ``dropout=False`` nothing in it is random."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = self.make()
        for module in model.modules():
            if isinstance(module, nn.Dropout) and not dropout:
                module.p = 0.0
        return model


def _images(shape: Shape) -> Inputs:
    generator = torch.Generator().manual_seed(shape.seed)
    size = (shape.batch, 3, shape.length, shape.length)
    return {"x": torch.randn(size, generator=generator)}


def _words(shape: Shape) -> Inputs:
    generator = torch.Generator().manual_seed(shape.seed)
    return {"ids": torch.randint(WORDS, (shape.batch, shape.length), generator=generator)}


def _vectors(shape: Shape) -> Inputs:
    generator = torch.Generator().manual_seed(shape.seed)
    return {"x": torch.randn(shape.batch, 16, generator=generator)}


LOCAL: tuple[Local, ...] = (
    Local("ResNet", ResNet, _images, other_length=24),
    Local("U-Net", UNet, _images, other_length=24),
    Local("mixture of experts", MixtureOfExperts, _words, other_length=12),
    Local("GRU", Recurrent, _words, other_length=12),
    Local("tied GPT", TiedGPT, _words, other_length=12, computes_loss=True),
    Local("iterative network", IterativeNetwork, _vectors),
)
