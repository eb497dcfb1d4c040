"""``out = pipe(x); f(out, y).backward()``: the pipeline as one function in the caller's graph.

    caller's graph      x ──▶ [ the whole pipeline ] ──▶ microbatch outputs ──▶ cat ──▶ out ──▶ f
    backward            x ◀── [ all B, pipelined   ] ◀── their gradients    ◀───────────────────

Parameters get their gradients inside, as in ``step``; the caller's graph sees inputs and outputs
only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from stageline.errors import PipeError
from stageline.running.caller_graph import DifferentiableRun
from stageline.running.engine import Engine
from stageline.running.events import Observer
from stageline.torch_private import engine_will_run


def call(
    engine: Engine,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    observer: Observer | None,
    errors: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """Return the outputs of the whole batch, with the pipeline in their graph.

    ``errors`` returns what the backward of a caller runs in.
    """
    run = engine.differentiate(args, kwargs, observer)
    tensors = [leaf for packet in run.packets for leaf in packet.leaves if isinstance(leaf, Tensor)]
    anchor = torch.empty(0, requires_grad=True)
    apply: Any = _Pipeline.apply  # untyped in torch
    attached = iter(apply(run, errors, anchor, *run.inputs, *tensors))
    for packet in run.packets:
        packet.leaves = [
            next(attached) if isinstance(leaf, Tensor) else leaf for leaf in packet.leaves
        ]
    outputs = [packet.value() for packet in run.packets]
    return engine.merge(outputs, run.sizes)


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: DifferentiableRun,
        errors: Callable[[], AbstractContextManager[None]],
        anchor: Tensor,
        *tensors: Tensor,
    ) -> Any:
        outputs = [tensor.detach() for tensor in tensors[len(run.inputs) :]]
        # Which outputs gradients can come for, microbatch by microbatch, in the order of tensors.
        ctx.flags = [
            [
                flag
                for leaf, flag in zip(packet.leaves, packet.differentiable, strict=True)
                if isinstance(leaf, Tensor)
            ]
            for packet in run.packets
        ]
        flat = [flag for flags in ctx.flags for flag in flags]
        ctx.mark_non_differentiable(
            *(out for out, flag in zip(outputs, flat, strict=True) if not flag)
        )
        ctx.set_materialize_grads(False)
        ctx.run_backward = run.backward
        ctx.errors = errors
        ctx.num_inputs = len(run.inputs)
        ctx.anchor_node = get_gradient_edge(anchor).node
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise PipeError(
                "a pipeline cannot be differentiated twice: it was asked for a backward with "
                "create_graph=True. Use the plain model for that loss"
            )
        if not engine_will_run(ctx.anchor_node):
            raise PipeError(
                "a pipeline gives gradients to its parameters and inputs together: call "
                ".backward() without inputs= instead of torch.autograd.grad(...)"
            )
        coming = iter(gradients)
        per_microbatch = [
            [gradient for flag, gradient in ((flag, next(coming)) for flag in flags) if flag]
            for flags in ctx.flags
        ]
        with ctx.errors():
            of_inputs = ctx.run_backward(per_microbatch) or [None] * ctx.num_inputs
        return (None, None, None, *of_inputs, *(None for _ in gradients))
