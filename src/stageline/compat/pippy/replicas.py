"""Stages that a caller has wrapped in ``DistributedDataParallel``: gradients are averaged once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def without_replicas(module: nn.Module) -> nn.Module:
    """Return the module of one replica, which a pipeline runs: DDP would reduce too early.

    DDP averages gradients in the first backward after a forward, of which a pipeline has one for
    each microbatch; what the others add would stay on their replica.
    """
    return module.module if isinstance(module, DistributedDataParallel) else module


@contextmanager
def averaged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Average the gradients that a step makes over the replicas of each module that has some."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(_averaged(module))
        yield


@contextmanager
def _averaged(replica: DistributedDataParallel) -> Iterator[None]:
    parameters = [each for each in replica.parameters() if each.requires_grad]
    # What earlier steps have left was averaged then.
    before = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    try:
        yield
        _average(parameters, replica.process_group)
    except BaseException:
        for each, old in zip(parameters, before, strict=True):
            each.grad = old
        raise
    for each, old in zip(parameters, before, strict=True):
        if old is not None:
            each.grad = old if each.grad is None else old.add_(each.grad)


def _average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    if not parameters:
        return
    device = parameters[0].device
    made = torch.tensor([each.grad is not None for each in parameters], device=device).int()
    dist.all_reduce(made, dist.ReduceOp.MAX, group)
    size = dist.get_world_size(group)
    for each, is_made in zip(parameters, made.tolist(), strict=True):
        if is_made:
            gradient = torch.zeros_like(each) if each.grad is None else each.grad
            dist.all_reduce(gradient, group=group)
            each.grad = gradient.div_(size)
