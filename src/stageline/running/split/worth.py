"""Which stages are worth splitting: those where W can fill more time than the bridges cost.

    gain   at most (stages - 1) x W             so often a rank waits in a step, which W may fill
    cost   microbatches x weights x BRIDGE      for every product with a weight, in F, I and W

A stage of small weights is left whole: I makes all its gradients, and W has nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from stageline.torch_private import has_gradient_hooks

VARIABLE = "STAGELINE_SPLIT_ALL"

BRIDGE = 1 << 19
"""What a bridge costs, in multiplications: a core makes so many in some 20 microseconds. Measured
on two ranks, 16 microbatches and 4 Linear per stage: with 2 million multiplications for each of
them, whole stages were a seventh faster; with 8 million it made no difference."""


def is_worth_splitting(
    parameters: Collection[nn.Parameter],
    given: Iterable[Any],
    *,
    num_stages: int,
    num_microbatches: int,
) -> bool:
    """Whether the gradients of a stage's weights should wait for W.

    Args:
        parameters: Of the stage, those that require a gradient.
        given: What goes into it.
        num_stages: Of the pipeline.
        num_microbatches: Of the step.
    """
    if os.environ.get(VARIABLE) == "1" or any(map(has_gradient_hooks, parameters)):
        return True  # somebody wants to see W, or does in it what may take any time
    work = multiplications(parameters, given)
    weights = sum(each.dim() > 1 for each in parameters)
    return work * (num_stages - 1) > num_microbatches * max(weights, 1) * BRIDGE


def multiplications(parameters: Iterable[nn.Parameter], given: Iterable[Any]) -> int:
    """Return about how many multiplications the gradients of a stage's weights take.

    Example:
        >>> import torch
        >>> multiplications(nn.Linear(256, 512, bias=False).parameters(), [torch.ones(4, 8, 256)])
        4194304
    """
    tensors = [each for each in given if isinstance(each, Tensor) and each.dim()]
    rows = max((each.numel() // max(each.shape[-1], 1) for each in tensors), default=1)
    return rows * sum(each.numel() for each in parameters)
