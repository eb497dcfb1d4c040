"""Which stages are worth splitting: those where W can fill more time than the bridges cost.

    gain   at most (stages - 1) x W             so often a rank waits in a step, which W may fill
    cost   microbatches x weights x BRIDGE      for every product with a weight, in F, I and W

A stage of small weights is left whole: I makes all its gradients, and W has nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from stageline.torch_private import has_gradient_hooks

VARIABLE = "STAGELINE_SPLIT_ALL"

BRIDGE = 1 << 19
"""What a bridge costs, in multiplications: a core makes so many in some 20 microseconds. Measured
on two ranks, 16 microbatches and 4 Linear per stage: with 2 million multiplications for each of
them, whole stages were a seventh faster; with 8 million it made no difference."""

_MOST_SHAPES = 1024  # of inputs; more are texts of any length, whose work is soon counted again


class Worth:
    """Tells of a stage whether the gradients of its weights should wait for W.

    What they take is counted when the stage is split for the first time with inputs of some shapes,
    and estimated until then: every weight meets every row of the input once. That is too much for
    convolutions, and too little for a layer that is called several times.
    """

    def __init__(self) -> None:
        self._counted: dict[Hashable, int] = {}

    def pays(
        self,
        parameters: Collection[nn.Parameter],
        given: Sequence[Any],
        *,
        num_stages: int,
        num_microbatches: int,
    ) -> bool:
        """Whether to split the stage.

        Args:
            parameters: Of the stage, those that require a gradient.
            given: What goes into it.
            num_stages: Of the pipeline.
            num_microbatches: Of the step.
        """
        if os.environ.get(VARIABLE) == "1" or any(map(has_gradient_hooks, parameters)):
            return True  # somebody wants to see W, or does in it what may take any time
        size = sum(each.numel() for each in parameters)
        counted = self._counted.get(_shapes(given))
        # However it was used, a weight has a gradient of its own size.
        work = _rows(given) * size if counted is None else counted + size
        weights = sum(each.dim() > 1 for each in parameters)
        return work * (num_stages - 1) > num_microbatches * max(weights, 1) * BRIDGE

    def note(self, given: Sequence[Any], work: int) -> None:
        """Take down how many multiplications wait for W, for inputs of these shapes."""
        if len(self._counted) >= _MOST_SHAPES:
            self._counted.clear()
        self._counted[_shapes(given)] = work


def _shapes(given: Sequence[Any]) -> Hashable:
    return tuple(each.shape for each in given if isinstance(each, Tensor))


def _rows(given: Sequence[Any]) -> int:
    tensors = [each for each in given if isinstance(each, Tensor) and each.dim()]
    return max((each.numel() // max(each.shape[-1], 1) for each in tensors), default=1)
