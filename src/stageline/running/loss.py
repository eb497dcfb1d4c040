"""The loss of a microbatch, and what it weighs in the loss of the batch.

    loss of the batch = sum over microbatches i of  weight_i * loss_i

``"mean"``: weight n_i / n, so that the mean over the batch comes out, uneven microbatches included.
``"sum"``: weight 1. A callable gets the microbatch and the whole batch and returns the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stageline.running.microbatches import LossReduction, Microbatches
from stageline.torch_private import is_bare

LossFunction = Callable[[Any, Any], Tensor]
REDUCTIONS = ("mean", "sum")
_ONE = (1,)
_IN_NUMPY = (torch.float32, torch.float64)

# What torch has for an output and a target, unless somebody was here before this import.
_FUNCTIONS = tuple(
    function
    for function in (
        *(F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.cross_entropy, F.nll_loss),
        *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div),
        *(F.poisson_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss, F.multi_margin_loss),
        *(F.multilabel_margin_loss, F.multilabel_soft_margin_loss),
    )
    if getattr(function, "__globals__", vars(F)) is vars(F)
)
_MODULES: dict[type, Any] = {
    kind: kind.forward
    for kind in (
        *(nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.CrossEntropyLoss, nn.NLLLoss),
        *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss),
        *(nn.HingeEmbeddingLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss),
        nn.MultiLabelSoftMarginLoss,
    )
    if kind.forward.__globals__ is vars(nn.modules.loss)
}


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

    def is_known(self) -> bool:
        """Whether it is a loss of torch's, which reaches no weight and differentiates nothing.

        Example:
            >>> LossRule(nn.CrossEntropyLoss(), "mean").is_known()
            True
            >>> LossRule(lambda output, target: output.sum(), "mean").is_known()
            False
        """
        function: Any = self.function
        if function is None:
            return True
        while isinstance(function, partial):
            function = function.func
        if any(getattr(F, each.__name__, None) is not each for each in _FUNCTIONS):
            return False  # somebody has put another one in its place
        if not isinstance(function, nn.Module):
            return any(function is each for each in _FUNCTIONS)
        tensors = (*function.parameters(), *function.buffers())
        is_torchs = type(function).forward is _MODULES.get(type(function)) and is_bare(function)
        return is_torchs and not any(tensor.requires_grad for tensor in tensors)

    def weight(self, microbatches: Microbatches, index: int) -> float:
        """Return what one microbatch weighs in the loss of the batch."""
        if self.reduction == "mean":
            return microbatches.sizes[index] / microbatches.rows
        if self.reduction == "sum":
            return 1.0
        assert callable(self.reduction)
        if microbatches.weights is not None:
            return microbatches.weights[index]
        return float(self.reduction(microbatches.part(index), microbatches.whole))


class Losses:
    """The losses of a step as they were, whatever becomes of their tensors, and what they weigh.

    Those on the CPU are kept as numbers and weighed at the end. Two operations of torch take some
    thirty microseconds between a forward and its backward, for which other ranks wait, and hardly
    three where one follows the other.

    Example:
        >>> losses = Losses()
        >>> losses.note(0, torch.tensor(1.0), 0.25)
        >>> losses.note(1, torch.tensor(2.0), 0.75)
        >>> losses.total()
        tensor(1.7500)
        >>> losses.each()
        tensor([1., 2.])
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Any, float, torch.dtype]] = {}
        self._tensors: dict[int, tuple[Tensor, float]] = {}
        self._shape = torch.Size()

    def note(self, microbatch: int, loss: Tensor, weight: float) -> None:
        """Keep the loss of a microbatch."""
        if loss.is_cpu:
            self._numbers[microbatch] = (loss.item(), weight, loss.dtype)
            self._shape = loss.shape
        else:
            # Not the loss itself, whose storage may be as large as what it was reduced from.
            self._tensors[microbatch] = (loss.detach().clone(), weight)

    def of(self, microbatch: int) -> Tensor:
        """Return the loss of a microbatch, as it was."""
        if microbatch in self._tensors:
            return self._tensors[microbatch][0]
        value, _, dtype = self._numbers[microbatch]
        return torch.tensor(value, dtype=dtype, device="cpu")

    def total(self) -> Tensor:
        """Add up the weighed losses, first microbatch first, as a plain loop would."""
        if not self._numbers:
            return _added({index: _weighed(*kept) for index, kept in self._tensors.items()})
        kept = [self._numbers[index] for index in range(len(self._numbers))]
        _, weight, dtype = kept[0]
        is_even = bool(weight) and all(each[1:] == (weight, dtype) for each in kept)
        if is_even and dtype in _IN_NUMPY:
            # One call for all; numpy's running sum is made of one addition after the other.
            weighed = torch.tensor([value for value, *_ in kept], dtype=dtype, device="cpu")
            weighed = weighed.mul_(weight)
            return torch.from_numpy(weighed.numpy().cumsum()[-1:]).reshape(self._shape)
        parts = {
            index: _weighed(torch.tensor(value, dtype=dtype, device="cpu"), weight)
            for index, (value, weight, dtype) in enumerate(kept)
        }
        return _added(parts).reshape(self._shape)

    def each(self) -> Tensor:
        """Return all losses as they were, first microbatch first, in one tensor."""
        if not self._numbers:
            return torch.stack([self._tensors[index][0] for index in range(len(self._tensors))])
        kept = [self._numbers[index] for index in range(len(self._numbers))]
        # The dtype that holds all of them, should they differ.
        dtype = reduce(torch.promote_types, {dtype for _, _, dtype in kept})
        values = [value for value, _, _ in kept]
        return torch.tensor(values, dtype=dtype, device="cpu").reshape(-1, *self._shape)


def _added(parts: Mapping[int, Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for index in range(len(parts)):
        total += parts[index]
    return total


def _weighed(loss: Tensor, weight: float) -> Tensor:
    # What weighs nothing has no say: it may be a mean over nothing, and 0 * nan is nan.
    return loss * weight if weight else torch.zeros_like(loss)


def own_loss(output: Any) -> Any:
    """Return the loss that a model computed: the output, its ``loss`` or first element."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    return output[0] if isinstance(output, (tuple, list)) and output else output
