"""Stages that sleep instead of computing, as if each rank had a device of its own.

    F   sleeps in forward
    I   sleeps when the gradient of the output has come, before that of the input is made
    W   sleeps once the gradient of the weight has been added up, which a schedule may put off

So B sleeps twice. Every sleep is timed as it happened, and ``longest_chain`` tells how long a step
with just these sleeps must take: sleeping is inexact, and that is no fault of the pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from benchmarks.tools.replaying import Chain, replay
from stageline.scheduling import Action, Kind

WIDTH = 4


class EmulatedStage(nn.Module):
    """A linear layer that takes its time.

    Args:
        seconds: How long F, I and W sleep, each.

    Attributes:
        sleeps: How long each has really slept, in the order in which they came.
    """

    draws_nothing = True

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.weight.register_post_accumulate_grad_hook(self._sleep)
        self.seconds = seconds
        self.sleeps: list[float] = []

    def _sleep(self, _: Tensor | None = None) -> None:
        if self.seconds:
            start = time.perf_counter()
            time.sleep(self.seconds)
            self.sleeps.append(time.perf_counter() - start)

    def forward(self, x: Tensor) -> Tensor:
        self._sleep()
        made = F.linear(x, self.weight)
        if made.requires_grad:
            made.register_hook(self._sleep)
        return made


def emulated_stages(number: int, seconds: float = 0.0) -> list[EmulatedStage]:
    """Return stages with the same weights in every process."""
    torch.manual_seed(0)
    return [EmulatedStage(seconds) for _ in range(number)]


def longest_chain(schedule: sl.Schedule, sleeps: Sequence[Sequence[float]]) -> Chain:
    """Return the makespan of a step in which nothing but these sleeps takes any time.

    Every action begins as soon as its rank is free and its input is made.

    Args:
        schedule: What has run.
        sleeps: Of each stage, in the order in which they came.

    Example:
        >>> longest_chain(sl.parse("0F0 0B0"), [[1.0, 2.0, 3.0]])
        Chain(seconds=6.0, actions=2)
    """
    left = [iter(of_stage) for of_stage in sleeps]
    rows = [
        [(a, sum(next(left[a.stage]) for _ in range(num_sleeps(a)))) for a in row]
        for row in schedule.compute_only().rows()
    ]
    if any(next(more, None) is not None for more in left):
        raise ValueError("more sleeps than the schedule has: they are not those of one step")
    return replay(rows, schedule.num_stages)


def num_sleeps(action: Action) -> int:
    """Stage 0 has no gradient to hand back: all of its backward can wait for W."""
    if action.kind is Kind.INPUT_GRADIENT:
        return 0 if action.stage == 0 else 1
    if action.kind is Kind.WEIGHT_GRADIENT:
        return 2 if action.stage == 0 else 1
    return 2 if action.kind is Kind.BACKWARD else 1
