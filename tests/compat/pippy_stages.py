"""Stages, batches and comparisons for the tests of PiPPy's schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stageline.compat.pippy import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from tests.compat.pippy_models import WIDTH, Untied

ALL = (
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
)
SPEC = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
mean_loss = nn.MSELoss()
sum_loss = nn.MSELoss(reduction="sum")


def batch(rows: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def untied() -> Untied:
    torch.manual_seed(0)
    return Untied()


def traced(model: nn.Module, *example: Any, spec: Any = None) -> list[PipelineStage]:
    pipe = pipeline(model, example, split_spec=spec)
    return [pipe.build_stage(i, "cpu") for i in range(pipe.num_stages)]


class Tanh(nn.Module):
    """One layer of the model as a stage that the caller has cut."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def manual(model: Untied) -> list[PipelineStage]:
    count = len(model.layers)
    return [PipelineStage(Tanh(layer), i, count, "cpu") for i, layer in enumerate(model.layers)]


def stages_of(kind: str, model: Untied) -> list[PipelineStage]:
    return manual(model) if kind == "manual" else traced(model, batch()[0], spec=SPEC)


def differing(model: nn.Module, plain: nn.Module, tolerance: float = 0.0) -> list[str]:
    """Return the names of gradients that are not those of the plain model."""
    names = []
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) is (theirs.grad is None), name
        if mine.grad is None or theirs.grad is None:
            continue
        error = float((mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
        if not torch.equal(mine.grad, theirs.grad) and error > tolerance:
            names.append(name)
    return names
