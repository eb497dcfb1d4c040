"""Steps whose batches change in size, length and type, for every transport."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import plain_step

WIDTH, STAGES, MICROBATCHES = 6, 4, 4


class Mixing(nn.Module):
    """A layer for sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.linear.weight.dtype)
        x = self.norm(x + F.gelu(self.linear(x)))
        mixed: Tensor = x + x.mean(1, keepdim=True)
        return mixed


class Choosing(nn.Module):
    """Keeps the rows whose sum is above 0: how many, only the data knows."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        if self.index in (0, 2):
            return x
        return x[x.sum(1) > -4 + self.index]


def mixing() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Mixing() for _ in range(STAGES)))


def choosing() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Choosing(index) for index in range(STAGES)))


def total(output: Tensor, target: Tensor) -> Tensor:
    """A loss that takes any number of rows."""
    return (output**2).sum() + target.sum() * 0


@dataclass(frozen=True)
class Step:
    """One call: the shape of its batch, its type, and what is done with it."""

    rows: int
    length: int | None = None
    dtype: torch.dtype = torch.float32
    trains: bool = True
    autocast: bool = False

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(seed)
        shape = (self.rows, WIDTH) if self.length is None else (self.rows, self.length, WIDTH)
        x, y = (torch.randn(shape, generator=own).to(self.dtype) for _ in range(2))
        return x, y.float()

    def modes(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


MIXED = [
    Step(8, 5),
    Step(8, 9),
    Step(7, 9),
    Step(8, 5, trains=False),
    Step(3, 2),  # fewer rows than microbatches
    Step(1, 1),
    Step(64, 130),  # larger than the first slab
    Step(8, 5, dtype=torch.float64),
    Step(8, 5, dtype=torch.bfloat16, trains=False),
    Step(8, 5, autocast=True),
    Step(5, 17, autocast=True, trains=False),
    Step(8, 5, dtype=torch.float16),
    Step(64, 130),
    Step(2, 300),
    Step(8, 5),
]

CHOSEN = [Step(16), Step(9, trains=False), Step(4), Step(40), Step(16), Step(3)]

Model = Callable[[], nn.Sequential]
KINDS: dict[str, tuple[Model, Any, list[Step]]] = {
    "changing": (mixing, F.mse_loss, MIXED),
    "data-dependent": (choosing, total, CHOSEN),
}

Found = list[tuple[Tensor, dict[str, Tensor]]]


def piped(kind: str, transport: Any, **settings: Any) -> Found:
    """Return the loss and the gradients held here of every step, on a pipeline."""
    make, loss_fn, steps = KINDS[kind]
    torch.set_num_threads(1)
    pipe = sl.Pipeline(
        make(),
        split=[1] * STAGES,
        num_microbatches=MICROBATCHES,
        loss_fn=loss_fn,
        transport=transport,
        keep_outputs=True,
        timeout=30,
        **settings,
    )
    found = []
    for seed, step in enumerate(steps):
        x, y = step.batch(seed)
        pipe.train(step.trains)
        pipe.zero_grad()
        with step.modes():
            result = pipe.step(x, target=y)
        outputs = result.outputs
        gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
        for part in outputs if isinstance(outputs, list) else [outputs]:
            assert isinstance(part, Tensor)
        found.append((result.loss, gradients))
    pipe.close()
    return found


def plain(kind: str) -> Found:
    """Return the same of the plain model."""
    make, loss_fn, steps = KINDS[kind]
    model = make()
    found: Found = []
    for seed, step in enumerate(steps):
        x, y = step.batch(seed)
        model.train(step.trains)
        model.zero_grad()
        with step.modes():
            result = plain_step(
                model, x, target=y, num_microbatches=MICROBATCHES, loss_fn=loss_fn, num_threads=1
            )
        if not step.trains:
            model.zero_grad()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((result.loss, gradients))
    return found


def differences(wanted: Found, parts: list[Found], steps: list[Step]) -> list[str]:
    """Compare what all ranks have found with the plain model, to the bit."""
    wrong = []
    for index, (loss, gradients) in enumerate(wanted):
        wrong += [f"step {index}: loss" for part in parts if not torch.equal(part[index][0], loss)]
        found = {name: value for part in parts for name, value in part[index][1].items()}
        if sorted(found) != sorted(gradients):
            wrong.append(f"step {index}: gradients of {sorted(found)}")
            continue
        wrong += [
            f"step {index} ({steps[index]}): gradient of {name}"
            for name, value in gradients.items()
            if not torch.equal(found[name], value)
        ]
    return wrong
