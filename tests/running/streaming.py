"""Models that draw random numbers, and what the tests of random streams compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import stageline as sl
from stageline.testing import plain_step

SEED = 3
WIDTH = 8


class Checkpointed(nn.Module):
    """A module whose forward is computed again in backward."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


class Noise(nn.Module):
    """Draws in many ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x) + torch.rand(x.shape[0], 1)
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) + torch.normal(0.0, 0.1, x.shape)
        x = x + F.gumbel_softmax(x, dim=-1) + torch.empty_like(x).uniform_(-0.1, 0.1)
        noise = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH))
        order = torch.randperm(WIDTH)
        picked = torch.multinomial(torch.ones(WIDTH), 2)
        sample: Tensor = noise.sample((x.shape[0],))
        return x[:, order] + 0.1 * sample + picked.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x.view(-1, 2, WIDTH // 2).repeat(1, 1, 2))[0]
        return out.mean(dim=1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.unsqueeze(1).repeat(1, 3, 1))
        x = x + self.attention(x, x, x)[0]
        out: Tensor = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        return out.mean(dim=1)


class OwnSeed(nn.Module):
    """Uses the global generator as people do: forked and seeded, and without a fork."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            x = x + torch.randn(WIDTH)
        state = torch.get_rng_state()
        first = torch.rand(WIDTH)
        torch.set_rng_state(state)
        assert torch.equal(first, torch.rand(WIDTH))
        torch.manual_seed(8)
        return x + torch.randn(WIDTH) + first


def layers() -> Iterator[nn.Module]:
    shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))
    yield nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Dropout(0.5))
    yield shared
    yield Noise()
    yield Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)), reentrant=True)
    yield Attention()
    yield OwnSeed()
    yield shared
    nested = Checkpointed(nn.Sequential(nn.Dropout(0.2), nn.Tanh()), reentrant=True)
    yield Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nested), reentrant=True)
    yield Checkpointed(nn.Sequential(Recurrent(), nn.Dropout(0.1)), reentrant=False)
    yield nn.Sequential(nn.RReLU(), nn.AlphaDropout(0.1), nn.Dropout(0.2, inplace=True))
    yield nn.Linear(WIDTH, 4)


def chain() -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(*layers())


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(
        4, (rows,), generator=generator
    )


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(output, 0.2), target) + 0.1 * torch.rand(1)


def plain_steps(model: nn.Module, steps: int, loss_fn: Any = F.cross_entropy) -> list[Tensor]:
    """Run steps of the plain model that accumulate; return the losses."""
    x, y = batch()
    return [
        plain_step(
            model, x, target=y, num_microbatches=3, loss_fn=loss_fn, num_threads=1, step=step
        ).loss
        for step in range(steps)
    ]


def differences(
    pipe: sl.Pipeline, plain: nn.Module, tied: tuple[str, ...] = (), tolerance: float = 1e-6
) -> list[str]:
    """Return the parameters whose gradients differ; what stages share may in the last bits."""
    wanted = dict(plain.named_parameters())
    wrong = []
    for name, parameter in pipe.named_parameters():
        got, want = parameter.grad, wanted[name].grad
        assert got is not None
        assert want is not None
        is_tied = name.startswith(tied) if tied else False
        apart = (got - want).abs().max() / want.abs().max()
        if not torch.equal(got, want) and not (is_tied and apart <= tolerance):
            wrong.append(f"{name}: {apart:.1e}")
    return wrong
