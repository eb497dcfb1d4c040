"""``out = pipe(x); f(out, y).backward()``: the pipeline as one function in the caller's graph.

    caller's graph      x ──▶ [ the whole pipeline ] ──▶ microbatch outputs ──▶ cat ──▶ out ──▶ f
    backward            x ◀── [ all B, pipelined   ] ◀── their gradients    ◀───────────────────

Parameters get their gradients inside, as in ``step``; the caller's graph sees inputs and outputs
only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stageline.running.engine import DifferentiableRun, Engine
from stageline.running.events import Observer
from stageline.running.microbatches import Replicated, merge_outputs, replicate
from stageline.running.torch_private import tree_flatten, tree_unflatten


def call(
    engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], observer: Observer | None
) -> Any:
    """Return the outputs of the whole batch, with the pipeline in their graph."""
    leaves, spec = tree_flatten((args, kwargs))
    inputs: list[Tensor] = []
    cut_off: list[Tensor] = []
    for index, leaf in enumerate(leaves):
        tensor = leaf.value if isinstance(leaf, Replicated) else leaf
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            inputs.append(tensor)
            cut_off.append(tensor.detach().requires_grad_())
            leaves[index] = replicate(cut_off[-1]) if isinstance(leaf, Replicated) else cut_off[-1]
    args, kwargs = tree_unflatten(leaves, spec)
    run = engine.differentiate(args, kwargs, observer)
    tensors = [leaf for packet in run.packets for leaf in packet.leaves if isinstance(leaf, Tensor)]
    anchor = torch.empty(0, requires_grad=True)
    apply: Any = _Pipeline.apply  # untyped in torch
    attached = iter(apply(run, cut_off, len(inputs), anchor, *inputs, *tensors))
    for packet in run.packets:
        packet.leaves = [
            next(attached) if isinstance(leaf, Tensor) else leaf for leaf in packet.leaves
        ]
    outputs = [packet.value() for packet in run.packets]
    run.packets.clear()
    return merge_outputs(outputs, run.sizes, engine.batch_dims)


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: DifferentiableRun,
        cut_off: list[Tensor],
        num_inputs: int,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> Any:
        outputs = [tensor.detach() for tensor in tensors[num_inputs:]]
        # Which outputs gradients can come for, microbatch by microbatch, in the order of the
        # tensors.
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
        ctx.cut_off = cut_off
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        coming = iter(gradients)
        per_microbatch = [
            [gradient for flag, gradient in ((flag, next(coming)) for flag in flags) if flag]
            for flags in ctx.flags
        ]
        ctx.run_backward(per_microbatch)
        of_inputs = [leaf.grad for leaf in ctx.cut_off]
        return (None, None, None, None, *of_inputs, *(None for _ in gradients))
