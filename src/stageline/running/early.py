"""The gradient of a stage's input leaves before those of its first weights are made.

    B      gradient ──┬──▶ dX = gradient · W      sent at once: the rank before waits for it
                      └──▶ dW = gradientᵀ · x     made while it travels

Autograd makes both in one operation and hands on neither before it has both. So where all of a
stage's input goes into an ``nn.Linear`` (``capturing.direct.entrances``), that layer is built in
two parts: one that knows only its weights, and behind it a function that makes the input's gradient
and sends it. Both are in one graph and run in one backward, where the parts of a weight's gradient
are added, and its hooks called, as in the plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stageline.capturing.direct.entrances import Entrance
from stageline.running.boundary import GradientSlot, Packet, foreign_backward
from stageline.running.transports.base import Edge, Endpoint
from stageline.torch_private import applier

LEAST_WORK = 1 << 23
"""Multiplications in the first layer from which it pays. A core makes so many in 0.2 ms; with the
fourth part of it, and all caches cold, the function here took longer than was gained."""


def pays(entrance: Entrance, tensor: Tensor) -> bool:
    """Whether the weights of a first layer take longer than it costs to let them wait."""
    if tensor.numel() * entrance.layer.out_features < LEAST_WORK:
        return False
    # The gradient of a single row, or of a single column, may be laid out in another way.
    columns = tensor.shape[-1]
    return 1 < columns < tensor.numel()


class EarlySlot:
    """The slot of a value whose gradient may leave in the middle of B.

    Attributes:
        tensor: The value, as a leaf: were it used anywhere else, that would show in its gradient.
        has_left: Whether the gradient was sent.
    """

    __slots__ = ("__weakref__", "_gradient", "_is_met", "_is_open", "_send", "has_left", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.requires_grad_()
        self.has_left = self._is_open = self._is_met = False
        self._send: Callable[[Packet], None] | None = None
        self._gradient: Tensor | None = None

    @property
    def is_open(self) -> bool:
        return self._is_open

    @is_open.setter
    def is_open(self, value: bool) -> None:
        if self.tensor.grad is not None:
            raise foreign_backward()
        self._is_open = value

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        if not self._is_met:  # the layer was called as ever, and there a leaf is exact
            return (self.tensor.grad,)
        self.check()
        return (self._gradient,)

    def check(self) -> None:
        """Raise if the value was used where it was not met."""
        if self._is_met and self.tensor.grad is not None:
            raise RuntimeError(
                "the input of a stage was used in a second place, which its code does not show: "
                "set STAGELINE_DIRECT_CALLS=0 and report this, please"
            )

    def meet(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Do what the layer does; let the gradient of its input come here."""
        made = F.linear(self.tensor.detach(), weight, bias)
        # Not where the stage has entered autocast by itself, or frozen the layer a moment ago.
        if not made.requires_grad or made.dtype is not weight.dtype:
            return F.linear(self.tensor, weight, bias)
        self._is_met = True
        met: Tensor = _meet(made, self, [weight])
        return met

    def leave_by(self, endpoint: Endpoint, edge: Edge) -> None:
        """Let the gradient leave as soon as it is there, if it may go before its turn."""
        if endpoint.directions_are_apart:
            self._send = partial(endpoint.send, edge)

    def take(self, gradient: Tensor) -> None:
        """Send the gradient of the input, or keep it."""
        if not self._is_open:
            raise foreign_backward()
        if self._send is None:
            self._gradient = gradient
        else:
            self._send(Packet([gradient]))
            self.has_left = True


class _Meet(torch.autograd.Function):
    """What a layer made that knows only its weights; in backward, what its input is to get.

    Given the weight in a list: as an argument by itself it would be part of this graph.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, slot: EarlySlot, weight: list[Tensor]) -> Tensor:
        ctx.slot = slot
        ctx.save_for_backward(*weight)
        ctx.set_materialize_grads(False)
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is not None:
            (weight,) = ctx.saved_tensors
            ctx.slot.take(_input_gradient(gradient, weight))
        return gradient, None, None


_meet = applier(_Meet)


def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a layer's input, of several rows, by the operations that torch has."""
    if gradient.dim() == 2:
        return gradient.mm(weight)
    rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight)
    return rows.view(*gradient.shape[:-1], weight.shape[1])


def enter_early(
    tensor: Tensor, entrance: Entrance, slots: dict[Any, GradientSlot], key: Any
) -> Tensor:
    """Let a value into a stage that will meet it at its entrance."""
    slot = slots[key] = EarlySlot(tensor)
    entrance.expect(slot)
    return slot.tensor
