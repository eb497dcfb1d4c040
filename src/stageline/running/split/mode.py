"""The function mode that builds bridges and holds into the graph of a stage while F runs.

It comes below the mode that redirects random draws, if both are entered: that one takes drawing
functions apart, and what they are made of comes here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stageline.running.linear import LINEAR, is_ordinary, layout_of
from stageline.running.split.deferred import Deferred, bridge, bridge_linear, hold
from stageline.running.split.parameters import Parameters, all_plain, exchanged
from stageline.running.streams.compiled import compiled_among
from stageline.torch_private import (
    NESTED_BACKWARDS,
    functorch_level,
    saved_tensor_hooks,
    tree_flatten,
    tree_unflatten,
    without_overrides,
)

# Operations whose time is in products with a weight: these wait for W. None of them saves its
# output, which whoever comes next may change in place.
_BRIDGED: frozenset[Any] = frozenset(
    {
        LINEAR,
        F.bilinear,
        torch.matmul,
        torch.mm,
        torch.mv,
        torch.bmm,
        torch.addmm,
        torch.addbmm,
        torch.baddbmm,
        torch.einsum,
        torch.tensordot,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.mm,
        Tensor.mv,
        Tensor.bmm,
        Tensor.addmm,
        Tensor.addbmm,
        Tensor.baddbmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
    }
)
_OPENED = F.multi_head_attention_forward

# Nearly half of the calls of a Transformer layer only ask: these pass before anybody looks.
_ASKS: frozenset[Any] = frozenset(
    {
        Tensor.dim,
        Tensor.size,
        Tensor.stride,
        Tensor.numel,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.__len__,
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "is_nested", "requires_grad")
        ),
    }
)
_NOBODY = Deferred()
_DIFFERENTIATES = NESTED_BACKWARDS | {torch.autograd.grad}


class Differentiates(BaseException):
    """A stage differentiates inside its forward, where it must find the plain model's graph.

    Not an ``Exception``: the stage's own code must not catch it.
    """


_whole: WeakSet[nn.Module] = WeakSet()  # stages that have been found to differentiate


def leave_whole(stage: nn.Module) -> None:
    """Build no bridge into a stage from now on: all its gradients are made in I."""
    _whole.add(stage)


def splittable_parameters(stage: nn.Module) -> dict[int, nn.Parameter]:
    """Return the parameters of a stage whose gradients can wait for W, by identity.

    Those of a stage that was compiled cannot: its code is fixed.
    """
    if stage in _whole or compiled_among(stage.modules()):
        return {}
    return {id(p): p for p in stage.parameters() if p.requires_grad}


class Splitting(TorchFunctionMode):
    """Lets a graph be built whose backward comes in two halves.

    It follows what a thread does that has entered it. Who knows which operations a stage has may
    also call them here, without entering it (layers.py).

    Args:
        leaves: The parameters of the stage that require a gradient, by identity.
        deferred: What is left to W.
    """

    def __init__(self, leaves: dict[int, nn.Parameter], deferred: Deferred) -> None:
        super().__init__()
        self.begin(leaves, deferred)

    def begin(self, leaves: dict[int, nn.Parameter], deferred: Deferred) -> None:
        """Begin another graph."""
        self._leaves = leaves
        self._parameters = Parameters(leaves)
        self._deferred = deferred

    def end(self) -> None:
        """Hold nothing of the graph that was built last."""
        self.begin({}, _NOBODY)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASKS:
            return func(*args, **kwargs or {})
        if func is LINEAR and not kwargs:  # torch has looked at the arguments
            return self.linear(*args)
        return self.follow(func, args, kwargs or {})

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch; what waits for W is built into the graph."""
        if func in _DIFFERENTIATES and self._deferred.places:
            raise Differentiates
        given = (*args, *kwargs.values()) if kwargs else args
        weights, others = self._parameters.sort(given)
        if not weights or not _can_wait((*weights, *others)):
            return func(*args, **kwargs)
        if not others:
            result = func(*args, **kwargs)
            self._parameters.learn(result)
            return result
        if func is _OPENED:
            with self:
                return without_overrides(func)(*args, **kwargs)
        if func in _BRIDGED and "out" not in kwargs and len({*map(id, others)}) == len(others):
            made = self._bridged(func, args, kwargs, others)
            self._deferred.work += _multiplications(weights, others, made)
            return made
        # What an operation changes in place must be the caller's own.
        changed = args[0] if args and _changes_first(func) else None
        new = hold(self._deferred, [weight for weight in weights if weight is not changed])
        return func(*exchanged(args, new), **_exchanged_values(kwargs, new))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Do the same for a linear layer: by far the most common operation that waits."""
        weights = (weight,) if bias is None else (weight, bias)
        is_usual = all(map(self._can_be_reached, weights)) and is_ordinary(weight)
        if is_usual and type(input) is Tensor and input.requires_grad:
            layout = None if input in self._parameters else layout_of(input)
            is_cast = torch.is_autocast_enabled(input.device.type)
            if layout is not None and not is_cast and _can_wait(weights):
                self._deferred.work += input.numel() * weight.shape[0]
                return bridge_linear(self._deferred, input, weight, bias, layout)
        return self.follow(LINEAR, (input, *weights), {})

    def _can_be_reached(self, weight: Tensor) -> bool:
        return id(weight) in self._leaves and weight.requires_grad

    def _bridged(
        self, func: Any, args: Any, kwargs: dict[str, Any], activations: Sequence[Tensor]
    ) -> Tensor:
        if len(activations) == 1 and args and activations[0] is args[0]:  # the most common one

            def call(inner: Sequence[Tensor]) -> Tensor:
                made: Tensor = func(inner[0], *args[1:], **kwargs)
                return made

        else:

            def call(inner: Sequence[Tensor]) -> Tensor:
                new = {id(outer): tensor for outer, tensor in zip(activations, inner, strict=True)}
                made: Tensor = func(*exchanged(args, new), **_exchanged_values(kwargs, new))
                return made

        return bridge(self._deferred, call, activations, self._leaves.values())

    def held(self, value: Any) -> Any:
        """Return what leaves the stage; what is made of parameters alone waits for W too."""
        leaves, spec = ([value], None) if isinstance(value, Tensor) else tree_flatten(value)
        waiting = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self._waits(leaf)]
        if not waiting:
            return value
        new = hold(self._deferred, waiting)
        leaves = [new.get(id(leaf), leaf) for leaf in leaves]
        return leaves[0] if spec is None else tree_unflatten(leaves, spec)

    def _waits(self, tensor: Tensor) -> bool:
        return tensor.requires_grad and tensor in self._parameters and all_plain((tensor,))


def _can_wait(tensors: Sequence[Tensor]) -> bool:
    """Whether a graph is built here that may be put together otherwise.

    Under saved-tensor hooks it may not: a checkpoint counts what its code saves, and compares when
    it computes again.
    """
    return (
        torch.is_grad_enabled()
        and saved_tensor_hooks() is None
        and functorch_level() is None
        and all_plain(tensors)
    )


def _multiplications(weights: Sequence[Tensor], activations: Sequence[Tensor], made: Tensor) -> int:
    """Return about how many multiplications an operation takes: exactly, if it is one product.

    Two matrices of m x k and k x n make one of m x n by m * k * n.
    """
    one, other = (sum(each.numel() for each in side) for side in (weights, activations))
    return math.isqrt(one * other * made.numel())


def _changes_first(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))


def _exchanged_values(kwargs: dict[str, Any], new: dict[int, Tensor]) -> dict[str, Any]:
    return {name: exchanged(value, new) for name, value in kwargs.items()} if kwargs else kwargs
