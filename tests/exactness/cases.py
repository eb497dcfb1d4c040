"""Models and settings of the exactness suite, built alike in every process that takes part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import stageline as sl
from stageline.running.transports.base import ThreadTransport
from stageline.testing import OrderedTransport, PlainResult, plain_step

SEED = 20
NUM_CLASSES = 5


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut, the second ReLU in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.body(x) + x)


class MeanOverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(inplace=True),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 24, bias=False),
        nn.LayerNorm(24),
        nn.GELU(),
        nn.Linear(24, NUM_CLASSES),
    )


def resnet() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8),
        nn.MaxPool2d(2),
        Residual(8),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, NUM_CLASSES),
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def transformer(dropout: float = 0.0) -> nn.Sequential:
    layers = [
        nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True) for _ in range(4)
    ]
    return nn.Sequential(*layers, MeanOverTokens(), nn.Linear(16, NUM_CLASSES))


def embedding() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(30, 16),
        nn.Linear(16, 16),
        nn.ReLU(),
        MeanOverTokens(),
        nn.Linear(16, NUM_CLASSES),
    )


class Drawing(nn.Module):
    """Draws in forward, and once more in a checkpoint when backward computes it again."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        # Not RReLU at the end: torch 2.13 itself gives garbage for it in such a checkpoint.
        self.inner = nn.Sequential(nn.Linear(width, width), nn.RReLU(), nn.Dropout(0.2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rand(x.shape[0], 1).to(x.dtype) + 0.1 * torch.randn_like(x)
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


def random_mlp() -> nn.Sequential:
    """Everything that draws, and one dropout that is called twice."""
    dropout = nn.Dropout(0.3)
    return nn.Sequential(
        nn.Linear(12, 24),
        dropout,
        nn.Sequential(nn.Linear(24, 24), nn.AlphaDropout(0.1), nn.ReLU()),
        Drawing(24, reentrant=True),
        dropout,
        Drawing(24, reentrant=False),
        nn.Linear(24, NUM_CLASSES),
    )


def _images(rows: int) -> Tensor:
    return torch.randn(rows, 3, 8, 8).to(memory_format=torch.channels_last)


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda rows: torch.randn(rows, 12)),
    "resnet": (resnet, _images),
    "transformer": (transformer, lambda rows: torch.randn(rows, 6, 16)),
    "random mlp": (random_mlp, lambda rows: torch.randn(rows, 12)),
    "transformer, dropout": (lambda: transformer(0.1), lambda rows: torch.randn(rows, 6, 16)),
    "embedding": (embedding, lambda rows: torch.randint(30, (rows, 7))),
}

# rows of the batch, num_microbatches
BATCHES = {"even": (8, 4), "uneven": (10, 4), "fewer rows than microbatches": (3, 8)}


@dataclass(frozen=True)
class Case:
    """One point of the suite."""

    model: str
    stages: int
    schedule: str
    batch: str
    precision: str
    ranks: int | None = None

    def build(self) -> tuple[nn.Sequential, Tensor, Tensor]:
        torch.manual_seed(SEED)
        make_model, make_inputs = MODELS[self.model]
        model = make_model()
        rows, _ = BATCHES[self.batch]
        return model, make_inputs(rows), torch.randint(NUM_CLASSES, (rows,))

    @property
    def num_microbatches(self) -> int:
        return BATCHES[self.batch][1]

    def autocast(self) -> Any:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)


def run_plain(case: Case, steps: int = 2) -> tuple[nn.Sequential, list[PlainResult]]:
    """Run the plain model for some steps without clearing gradients; intra-op threads: one."""
    model, x, y = case.build()
    with case.autocast():
        results = [
            plain_step(
                model,
                x,
                target=y,
                num_microbatches=case.num_microbatches,
                loss_fn=F.cross_entropy,
                num_threads=1,
                step=step,
            )
            for step in range(steps)
        ]
    return model, results


def differences(case: Case, transport: ThreadTransport | str | None, steps: int = 2) -> list[str]:
    """Run a case as a pipeline; return everything in which it differs from the plain model."""
    plain, expected = run_plain(case, steps)
    model, x, y = case.build()
    pipe = sl.Pipeline(
        model,
        split=case.stages,
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        loss_fn=F.cross_entropy,
        ranks=case.ranks,
        transport=transport,
        keep_outputs=True,
        timeout=30,
    )
    wrong = []
    for step, wanted in enumerate(expected):
        with case.autocast():
            result = pipe.step(x, target=y)
        if not torch.equal(result.loss, wanted.loss):
            wrong.append(f"loss of step {step}: {result.loss} instead of {wanted.loss}")
        if not torch.equal(result.outputs, wanted.outputs):
            wrong.append(f"outputs of step {step}")
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    buffers = dict(plain.named_buffers())
    for name, parameter in pipe.named_parameters():
        if not same(parameter.grad, gradients[name]):
            wrong.append(f"gradient of {name}")
    for name, buffer in pipe.named_buffers():
        if not same(buffer, buffers[name]):
            wrong.append(f"buffer {name}")
    pipe.close()
    return wrong


def same(got: Tensor | None, wanted: Tensor | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    return torch.equal(got, wanted) and got.stride() == wanted.stride()


def thread_transport(name: str) -> ThreadTransport | str:
    return OrderedTransport() if name == "ordered" else name


def differences_in_process(rank: int, case: Case, transport: str) -> list[str]:
    """Run a case on one rank of several processes."""
    torch.set_num_threads(1)
    return differences(case, transport)
