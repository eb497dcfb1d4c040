"""How a step grows with the number of microbatches: what it costs whatever their number?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from benchmarks.scaling.turns import race, steps
from benchmarks.tools.pages import table
from stageline.testing import plain_step

COUNTS = (8, 16, 32, 64, 128, 256, 512)
WIDTH, ROWS, LAYERS = 64, 8, 8
NAMES = ("plain", "memory", "shared-memory", "process-group")
HEADS = ("plain", "threads", "shared memory", "gloo")
SECONDS = 0.2  # of a turn; at least one step

_pipes: dict[str, sl.Pipeline] = {}  # in each process


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


def prepare(rank: int, name: str, count: int) -> None:
    """Build a step in this process, and compare its loss with the plain model's.

    Raises:
        AssertionError: It is another one.
    """
    if name in _pipes:
        _pipes.pop(name).close()
    if rank and name in ("plain", "memory"):
        return
    torch.manual_seed(1)
    x, y = torch.randn(2, ROWS * count, WIDTH)
    if name == "plain":
        steps[name] = _loop(model(), x, y, count)
        return
    wanted = plain_step(model(), x, target=y, num_microbatches=count, loss_fn=F.mse_loss)
    pipe = _pipes[name] = sl.Pipeline(
        model(),
        split=[LAYERS, LAYERS],
        num_microbatches=count,
        loss_fn=F.mse_loss,
        transport=name,
    )
    torch.testing.assert_close(pipe.step(x, target=y).loss, wanted.loss)
    steps[name] = lambda: pipe.step(x, target=y)


def _loop(whole: nn.Module, x: Tensor, y: Tensor, count: int) -> Callable[[], None]:
    parts = list(zip(x.split(ROWS), y.split(ROWS), strict=True))

    def step() -> None:
        for inputs, target in parts:
            (F.mse_loss(whole(inputs), target) / count).backward()

    return step


def run(counts: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """Return the median seconds of a step by number of microbatches and name."""
    return race(prepare, NAMES, counts, rounds=rounds, seconds=SECONDS)


def fixed_and_each(seconds: dict[int, float]) -> tuple[float, float]:
    """Return what a step takes whatever its microbatches, and what each adds: a line through both.

    Relative deviations count, or the largest number would decide alone.

    Example:
        >>> [round(x, 6) for x in fixed_and_each({8: 1.8, 16: 2.6})]
        [1.0, 0.1]
    """
    weights = {m: 1 / t**2 for m, t in seconds.items()}
    total = sum(weights.values())
    middle_m = sum(w * m for m, w in weights.items()) / total
    middle_t = sum(w * seconds[m] for m, w in weights.items()) / total
    slope = sum(w * (m - middle_m) * (seconds[m] - middle_t) for m, w in weights.items()) / sum(
        w * (m - middle_m) ** 2 for m, w in weights.items()
    )
    return middle_t - slope * middle_m, slope


def text(found: dict[int, dict[str, float]]) -> str:
    """Return the table: of each way, milliseconds and microseconds per microbatch."""
    rows = [
        [
            str(count),
            *(f"{1e3 * times[name]:.2f} ({1e6 * times[name] / count:.0f})" for name in NAMES),
        ]
        for count, times in found.items()
    ]
    lines = [fixed_and_each({m: times[name] for m, times in found.items()}) for name in NAMES]
    rows.append(["a line: ms", *(f"{1e3 * a:.2f} + {1e3 * b:.3f} m" for a, b in lines)])
    head = ["m", *(f"{head}, ms (us per microbatch)" for head in HEADS)]
    return table(head, rows)
