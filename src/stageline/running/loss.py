"""The loss of a microbatch, and what it weighs in the loss of the batch.

    loss of the batch = sum over microbatches i of  weight_i * loss_i

``"mean"``: weight n_i / n, so that the mean over the batch comes out, uneven microbatches included.
``"sum"``: weight 1. A callable gets the microbatch and the whole batch and returns the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stageline.running.microbatches import LossReduction, Microbatches

LossFunction = Callable[[Any, Any], Tensor]
REDUCTIONS = ("mean", "sum")
_ONE = (1,)


@dataclass(frozen=True)
class LossRule:
    """How the last stage turns an output into a loss, and what a microbatch weighs."""

    function: LossFunction | None
    reduction: LossReduction

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of one microbatch."""
        loss = own_loss(output) if self.function is None else self.function(output, target)
        if not isinstance(loss, Tensor) or (loss.dim() and loss.shape != _ONE):
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            what, way_out = "loss_fn", "reduce it over the microbatch with .mean() or .sum()"
            if self.function is None:
                what, way_out = "the model's own loss", "pass loss_fn=..., or return a loss"
            raise TypeError(f"{what} must be a tensor with one element, got {got}: {way_out}")
        return loss

    def weight(self, microbatches: Microbatches, index: int) -> float:
        """Return what one microbatch weighs in the loss of the batch."""
        if self.reduction == "mean":
            return microbatches.sizes[index] / microbatches.rows
        if self.reduction == "sum":
            return 1.0
        assert callable(self.reduction)
        return float(self.reduction(microbatches.part(index), microbatches.whole))


def own_loss(output: Any) -> Any:
    """Return the loss that a model computed: the output, its ``loss`` or first element."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    return output[0] if isinstance(output, (tuple, list)) and output else output
