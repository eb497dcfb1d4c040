"""The reference: the plain model, run over the same microbatches in a loop.

No stage, no schedule, no transport; the loss is multiplied by its weight, and one backward of the
whole graph follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.streams.tracking import numbers_of
from stageline.running.autocast import autocast_cache_off, autocast_devices, autocast_suspended
from stageline.running.loss import LossFunction, LossRule
from stageline.running.merging import merge_outputs
from stageline.running.microbatches import BatchDims, LossReduction, Microbatches
from stageline.running.streams.calls import (
    CallStreams,
    StageStreams,
    Streams,
    generator_untouched,
)
from stageline.running.streams.candidates import WRAPPERS
from stageline.running.timetable import Purpose
from stageline.torch_private import run_backward


@dataclass(frozen=True)
class PlainResult:
    """What a plain step gives: compare it with a ``StepResult``."""

    loss: Tensor
    outputs: Any


def plain_step(
    model: nn.Module,
    *args: Any,
    target: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    num_microbatches: int,
    loss_fn: LossFunction | None = None,
    loss_reduction: LossReduction = "mean",
    batch_dims: BatchDims = 0,
    num_threads: int | None = None,
    step: int = 0,
) -> PlainResult:
    """Accumulate the gradients of one batch in the plain model; return its loss and outputs.

    Random numbers are those of a pipeline: they depend on the seed, the step, the microbatch and
    the place in the model, and the default generator is not moved.

    Args:
        num_threads: Intra-op threads, as many as each rank of the pipeline has: torch may add in
            another order with another number.
        step: How many steps came before: the ``step_number`` of the pipeline.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> x, y = torch.randn(5, 3), torch.randn(5, 1)
        >>> result = plain_step(
        ...     model, x, target=y, num_microbatches=2, loss_fn=nn.functional.mse_loss
        ... )
        >>> result.outputs.shape
        torch.Size([5, 1])
    """
    batch = Microbatches(
        args,
        dict(kwargs or {}),
        target,
        num_microbatches=num_microbatches,
        batch_dims=batch_dims,
    )
    rule = LossRule(loss_fn, loss_reduction)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        with ExitStack() as stack:
            if autocast_devices():
                stack.enter_context(autocast_cache_off())
            stack.enter_context(generator_untouched())
            streams = _streams(model, loss_fn, step)
            if streams.stages or streams.loss_draws:
                stack.enter_context(streams.installed())
            total, outputs = _loop(model, batch, rule, streams)
    finally:
        torch.set_num_threads(before)
    return PlainResult(torch.as_tensor(total), merge_outputs(outputs, batch.sizes, batch_dims))


def _loop(
    model: nn.Module, batch: Microbatches, rule: LossRule, streams: CallStreams
) -> tuple[Tensor | float, list[Any]]:
    """Run the microbatches one after the other; return the loss of the batch and all outputs."""
    total: Tensor | float = 0.0
    outputs = []
    for index in range(batch.count):
        part = batch.part(index)
        with streams.forward(0, index):
            output = model(*part.args, **part.kwargs)
        with streams.loss(index):
            loss = rule.loss(output, part.target)
        weight = rule.weight(batch, index)
        if weight:  # what weighs nothing has no say: 0 * nan would be nan
            loss = loss * weight
            # Not loss.backward(), which would leave the streams.
            with autocast_suspended(autocast_devices()), streams.backward(0, index):
                run_backward([loss], [torch.ones_like(loss)])
            total = total + loss.detach()
        outputs.append(output)
    return total, outputs


def _streams(model: nn.Module, loss_fn: LossFunction | None, step: int) -> CallStreams:
    """Return the streams of the model as one stage."""
    plain = model
    while type(plain).__name__ in WRAPPERS:
        plain = next(plain.children())
    whole = StageStreams.of(model, plain, numbers_of(plain), None)
    seed, kind = torch.initial_seed(), Purpose.TRAIN.name
    streams = Streams({0: whole}, loss_fn, may_draw=True).of_call(kind, lambda: seed, step)
    return streams or CallStreams({}, loss_draws=False, seed=seed, kind=kind, number=step)
