"""The gradient of a stage's input leaves before those of its first weights are made.

    B      gradient ──┬──▶ dX = gradient · W      sent at once: the rank before waits for it
                      └──▶ dW = gradientᵀ · x     made while it travels

Autograd makes both in one operation and hands on neither before it has both. So where all of a
stage's input goes into an ``nn.Linear`` (``capturing.direct.entrances``), that layer is built in
two parts: one that knows only its weights, and behind it a function that makes the input's gradient
and sends it. Both are in one graph and run in one backward, where the parts of a weight's gradient
are added, and its hooks called, as in the plain model. What is not differentiable in two parts is a
gradient of a gradient, so a stage takes part only if its code, and that of the loss, was read.
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
from stageline.running.linear import Layout, input_gradient, layout_of
from stageline.running.transports.base import Edge, Endpoint
from stageline.torch_private import applier, engine_will_run

LEAST_WORK = 1 << 23
"""Multiplications in the first layer from which it pays. A core makes so many in 0.2 ms; with the
fourth part of it, and all caches cold, the function here took longer than was gained."""


def pays(entrance: Entrance, tensor: Tensor) -> bool:
    """Whether the weights of a first layer take longer than it costs to let them wait."""
    return tensor.numel() * entrance.layer.out_features >= LEAST_WORK


class EarlySlot:
    """The slot of a value whose gradient may leave in the middle of B.

    The value is a leaf of the stage's graph, which is exact for what a linear layer is given. The
    layer's part of its gradient comes here and nowhere else; any other part would lie in the leaf.

    Attributes:
        tensor: The value.
        has_left: Whether its gradient was sent.
    """

    __slots__ = ("__weakref__", "_gradient", "_is_open", "_layout", "_send", "has_left", "tensor")

    def __init__(self, tensor: Tensor, layout: Layout) -> None:
        self.tensor = tensor.requires_grad_()
        self.has_left = False
        self._is_open = False
        self._layout = layout
        self._gradient: Tensor | None = None
        self._send: Callable[[Packet], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the backward of this stage runs; gradients that come before are refused."""
        return self._is_open

    @is_open.setter
    def is_open(self, value: bool) -> None:
        if self.tensor.grad is not None:
            raise foreign_backward()
        self._is_open = value

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        # The layer may have been called in another way after all: then autograd has it.
        return (self.tensor.grad if self._gradient is None else self._gradient,)

    def meet(self, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Do what the layer does; let the gradient of its input come here first."""
        is_usual = torch.is_grad_enabled() and weight.requires_grad
        # A stage may also have entered autocast by itself, where weights are others than these.
        if not is_usual or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        met: Tensor = _meet(input, F.linear(input.detach(), weight, bias), self, [weight])
        return met

    def leave_by(self, endpoint: Endpoint, edge: Edge) -> None:
        """Let the gradient leave as soon as it is there, if it may go before its turn."""
        if endpoint.directions_are_apart:
            self._send = partial(endpoint.send, edge)

    def take(self, gradient: Tensor, weight: Tensor) -> None:
        """Make the gradient of the value from that of what the layer made; send it if it may go.

        Raises:
            RuntimeError: The backward of the stage does not run, but another one; or there is such
                a gradient already.
        """
        if not self._is_open:
            raise foreign_backward()
        if self._is_there:
            raise _second_part()
        made = input_gradient(gradient, weight, self._layout)
        send, self._send = self._send, None
        if send is None:
            self._gradient = made
        else:
            send(Packet([made]))
            self.has_left = True

    def close(self) -> None:
        """End the backward of the stage.

        Raises:
            RuntimeError: Another part of the gradient has come by another way.
        """
        self._send = None
        if self._is_there and self.tensor.grad is not None:
            raise _second_part()

    @property
    def _is_there(self) -> bool:
        """Whether the layer has made its part of the gradient."""
        return self.has_left or self._gradient is not None


def _second_part() -> RuntimeError:
    return RuntimeError(
        "the input of a stage was used in a second place, which its code does not show: "
        "set STAGELINE_DIRECT_CALLS=0 and report this, please"
    )


class _Meet(torch.autograd.Function):
    """What a layer made that knows only its weights; in backward, what its input is to get.

    Given the weight in a list: as an argument by itself it would be part of this graph.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, made: Tensor, slot: EarlySlot, weight: list[Tensor]
    ) -> Tensor:
        ctx.slot = slot
        # As torch's own operation saves it: what ``weight.data`` is set to later does not matter.
        ctx.save_for_backward(weight[0].t())
        ctx.set_materialize_grads(False)
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient that is itself to be differentiated goes through the first layer of a "
                "stage, which is built in two parts: set STAGELINE_DIRECT_CALLS=0"
            )
        # A backward from elsewhere may want the weights alone, and not the value.
        if gradient is not None and engine_will_run(ctx.next_functions[0][0]):
            (transposed,) = ctx.saved_tensors
            ctx.slot.take(gradient, transposed.t())
        return None, gradient, None, None


_meet = applier(_Meet)


def enter_early(
    tensor: Tensor, entrance: Entrance, slots: dict[Any, GradientSlot], key: Any
) -> Tensor | None:
    """Let a value into a stage that will meet it at its entrance; None if it must go another way.

    If it is not met, its gradient is that of any leaf.
    """
    layout = layout_of(tensor)
    if layout is None:
        return None
    slot = slots[key] = EarlySlot(tensor, layout)
    entrance.expect(slot)
    return tensor
