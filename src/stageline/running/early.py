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
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stageline.capturing.direct.entrances import Entrance
from stageline.running.boundary import GradientSlot, Packet, enter_one
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

    Attributes:
        tensor: The value, for as long as somebody else has it.
        has_left: Whether its gradient was sent.
    """

    __slots__ = ("__weakref__", "_entered", "_send", "has_left", "tensor")

    def __init__(self, tensor: Tensor, entered: GradientSlot) -> None:
        self.tensor = ref(tensor)
        self.has_left = False
        self._entered = entered
        self._send: Callable[[Packet], None] | None = None

    @property
    def is_open(self) -> bool:
        return self._entered.is_open

    @is_open.setter
    def is_open(self, value: bool) -> None:
        self._entered.is_open = value

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        return self._entered.gradients

    def meet(self, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Do what the layer does; let the gradient of its input come here first."""
        layout = layout_of(input)
        is_usual = torch.is_grad_enabled() and weight.requires_grad
        # A stage may also have entered autocast by itself, where weights are others than these.
        if layout is None or not is_usual or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        made = F.linear(input.detach(), weight, bias)
        met: Tensor = _meet(input, made, self, [weight], layout)
        return met

    def leave_by(self, endpoint: Endpoint, edge: Edge) -> None:
        """Let the gradient leave as soon as it is there, if it may go before its turn."""
        if endpoint.directions_are_apart:
            self._send = partial(endpoint.send, edge)

    def is_asked_for(self) -> bool:
        """Whether the backward that runs now wants the gradient of the value, among others."""
        return engine_will_run(self._entered)  # type: ignore[arg-type]  # it is a node, too

    def take(self, gradient: Tensor) -> bool:
        """Send the gradient, if it may leave; return whether it has left."""
        send, self._send = self._send, None
        if send is not None:
            send(Packet([gradient]))
            self.has_left = True
        return send is not None

    def close(self) -> None:
        """End the backward of the stage.

        Raises:
            RuntimeError: Another part of the gradient has come after it had left.
        """
        self._send = None
        if self.has_left and self._entered.gradients[0] is not None:
            raise RuntimeError(
                "the input of a stage was used in a second place, which its code does not show: "
                "set STAGELINE_DIRECT_CALLS=0 and report this, please"
            )


class _Meet(torch.autograd.Function):
    """What a layer made that knows only its weights; in backward, what its input is to get.

    Given the weight in a list: as an argument by itself it would be part of this graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        made: Tensor,
        slot: EarlySlot,
        weight: list[Tensor],
        layout: Layout,
    ) -> Tensor:
        ctx.slot = slot
        ctx.layout = layout
        # As torch's own operation saves it: what ``weight.data`` is set to later does not matter.
        ctx.save_for_backward(weight[0].t())
        ctx.set_materialize_grads(False)
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        slot: EarlySlot = ctx.slot
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient that is itself to be differentiated goes through the first layer of a "
                "stage, which is built in two parts: set STAGELINE_DIRECT_CALLS=0"
            )
        if gradient is None or not slot.is_asked_for():
            return None, gradient, None, None, None
        (transposed,) = ctx.saved_tensors
        for_input = input_gradient(gradient, transposed.t(), ctx.layout)
        return None if slot.take(for_input) else for_input, gradient, None, None, None


_meet = applier(_Meet)


def enter_early(
    tensor: Tensor, entrance: Entrance, slots: dict[Any, GradientSlot], key: Any
) -> Tensor:
    """Let a value into a stage that will meet it at its entrance; if it does not, as any other."""
    entered = enter_one(tensor, slots, key)
    slot = slots[key] = EarlySlot(entered, slots[key])
    entrance.expect(slot)
    return entered
