"""How a step grows with the size of what its stages hand over.

Two stages that compute nothing: the first returns a tensor that it has made before, the second
reads its ends and returns a gradient that it has made before. So a step is its messages, one each
way per microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import stageline as sl
from benchmarks.scaling.turns import race, steps
from benchmarks.tools.pages import table
from stageline.testing import plain_step
from stageline.torch_private import applier

SIZES = {f"{1 << n} KiB": 1 << (n + 10) for n in range(0, 10, 2)} | {
    f"{1 << n} MiB": 1 << (n + 20) for n in range(0, 7, 2)
}
TRANSPORTS = {
    "memory": "threads",
    "shared-memory": "shared memory",
    "process-group": "gloo",
}
MICROBATCHES = 8
SECONDS = 0.1  # of a turn; at least one step


class _Emit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, made: Tensor) -> Tensor:
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].view(-1)[-1:].clone(), None


class _Absorb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x[:, :1] + x[:, -1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.gradient.detach(), None


_emit, _absorb = applier(_Emit), applier(_Absorb)


class Emitter(nn.Module):
    """Returns the same large tensor for every microbatch."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.made = torch.linspace(1, 2, num_bytes // 4)[None]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _emit(self.weight, self.made)
        return made


class Absorber(nn.Module):
    """Takes a large tensor, and returns the same large gradient for every microbatch."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.gradient = torch.linspace(3, 4, num_bytes // 4)[None]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _absorb(x, self.gradient)
        return made


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).mean()


_pipes: dict[str, sl.Pipeline] = {}


def prepare(rank: int, transport: str, size: str) -> None:
    """Build a step in this process; its loss and its gradient must be the plain model's.

    Raises:
        AssertionError: They are not.
    """
    num_bytes = SIZES[size]
    if transport in _pipes:
        _pipes.pop(transport).close()
    if rank and transport == "memory":
        return
    x = torch.arange(1.0, MICROBATCHES + 1)[:, None]
    plain = nn.Sequential(Emitter(num_bytes), Absorber(num_bytes))
    wanted = plain_step(plain, x, target=x, num_microbatches=MICROBATCHES, loss_fn=loss_fn)
    pipe = _pipes[transport] = sl.Pipeline(
        nn.Sequential(Emitter(num_bytes), Absorber(num_bytes)),
        split=[1, 1],
        num_microbatches=MICROBATCHES,
        loss_fn=loss_fn,
        transport=transport,
    )
    torch.testing.assert_close(pipe.step(x, target=x).loss, wanted.loss)
    for parameter in pipe.parameters():
        torch.testing.assert_close(parameter.grad, next(plain.parameters()).grad)
    steps[transport] = lambda: pipe.step(x, target=x)


def run(sizes: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step by size and transport."""
    return race(prepare, list(TRANSPORTS), sizes, rounds=rounds, seconds=SECONDS)


def text(found: dict[str, dict[str, float]]) -> str:
    """Return the table: milliseconds of a step, and what it carries per second."""
    head = ["message", *(f"{name}, ms (GiB/s)" for name in TRANSPORTS.values())]
    rows = []
    for size, times in found.items():
        carried = 2 * MICROBATCHES * SIZES[size] / 2**30
        cells = [
            f"{1e3 * times[name]:.2f}"
            # Threads hand over the tensor itself: nothing is carried.
            + ("" if name == "memory" else f" ({carried / times[name]:.2g})")
            for name in TRANSPORTS
        ]
        rows.append([size, *cells])
    return table(head, rows)
