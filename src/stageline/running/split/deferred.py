"""What I leaves for W, and the two places in a graph where it is left.

    bridge   an operation of parameters and activations: the activations' gradients go on in I, the
             operation itself waits with the gradient of its output; a linear layer, by far the most
             common one, has a bridge of its own
    hold     a value made of parameters alone that meets others: its gradient waits

W runs one backward from everything that waits. The operations that wait keep the numbers that
autograd gave them in forward, and autograd goes by these, latest first. So the parts of a weight's
gradient are added in the order of the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from stageline.running.boundary import Root, gradient_edge
from stageline.running.linear import LINEAR, Layout, input_gradient
from stageline.torch_private import applier, gradients_of, run_backward


class Deferred:
    """What is left to W of one microbatch of one stage.

    Attributes:
        is_open: Whether I runs: a gradient that comes at any other time would be counted twice.
        places: How many bridges and holds were built.
        work: About how many multiplications wait behind the bridges.
    """

    __slots__ = ("_edges", "_ends", "_gradients", "is_open", "places", "work")

    def __init__(self) -> None:
        self._edges: list[Root] = []
        self._gradients: list[Tensor] = []
        self._ends: Collection[nn.Parameter] = ()
        self.is_open = False
        self.places = 0
        self.work = 0

    @classmethod
    def whole(cls, roots: Sequence[Root], gradients: Sequence[Tensor]) -> Deferred:
        """Return a backward that is left to W as it is: nobody waits for the input's gradient."""
        deferred = cls()
        deferred._edges += roots
        deferred._gradients += gradients
        return deferred

    def ends_in(self, parameters: Collection[nn.Parameter]) -> None:
        """Say in which parameters graphs end that wait, and have other ends too, for I."""
        self._ends = parameters

    def keep(self, edge: GradientEdge, gradient: Tensor) -> None:
        if not self.is_open:
            raise RuntimeError(
                "a gradient was asked for inside the forward of a stage whose backward is split "
                "into I and W, in a way that could not be seen: use a schedule with B for it"
            )
        self._edges.append(edge)
        self._gradients.append(gradient)

    def run(self) -> None:
        """Accumulate the gradients of the parameters; everything that waited is let go."""
        edges, gradients = self._edges, self._gradients
        self._edges, self._gradients = [], []
        if edges:
            ends = [each for each in self._ends if each.requires_grad]  # or was frozen meanwhile
            run_backward(edges, gradients, ends)


# Makes a place part of the graph though it leads nowhere; nothing ever accumulates into it.
_ANCHOR = torch.empty(0, requires_grad=True)


class _Bridge(torch.autograd.Function):
    """An operation in a graph of its own.

    Given its result there, in a list: as an argument by itself it would be part of this graph too.
    """

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferred, made: list[Tensor], inner: Sequence[Tensor], *outer: Tensor
    ) -> Tensor:
        ctx.deferred = deferred
        ctx.inner = inner
        ctx.edge = gradient_edge(made[0])
        ctx.set_materialize_grads(False)
        return made[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return (None, None, None, *(None for _ in ctx.inner))
        ctx.deferred.keep(ctx.edge, gradient)
        return (None, None, None, *gradients_of(ctx.edge, gradient, ctx.inner))


class _Linear(torch.autograd.Function):
    """A linear layer in a graph of its own, which knows only its weights.

    The gradient of its input is made here, without another call of the engine.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        deferred: Deferred,
        made: list[Tensor],
        weight: list[Tensor],
        layout: Layout,
    ) -> Tensor:
        (result,) = made
        ctx.deferred = deferred
        ctx.layout = layout
        ctx.edge = gradient_edge(result)
        ctx.save_for_backward(weight[0])
        ctx.set_materialize_grads(False)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return _NOTHING
        ctx.deferred.keep(ctx.edge, gradient)
        (weight,) = ctx.saved_tensors
        return input_gradient(gradient, weight, ctx.layout), None, None, None, None


_NOTHING = (None,) * 5


class _Hold(torch.autograd.Function):
    """Values whose gradients stop here."""

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferred, edges: Sequence[GradientEdge], anchor: Tensor, *values: Tensor
    ) -> Any:
        ctx.deferred = deferred
        ctx.edges = edges
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for edge, gradient in zip(ctx.edges, gradients, strict=True):
            if gradient is not None:
                ctx.deferred.keep(edge, gradient)
        return (None, None, None, *(None for _ in gradients))


_cross, _cross_linear, _stop = applier(_Bridge), applier(_Linear), applier(_Hold)


def bridge_linear(
    deferred: Deferred, input: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout
) -> Tensor:
    """Run a linear layer behind a bridge."""
    deferred.places += 1
    made = LINEAR(input.detach(), weight, bias)
    # Detached, as torch saves it: what ``weight.data`` is set to later does not matter.
    result: Tensor = _cross_linear(input, deferred, [made], [weight.detach()], layout)
    return result


def bridge(
    deferred: Deferred,
    call: Callable[[Sequence[Tensor]], Tensor],
    activations: Sequence[Tensor],
    parameters: Collection[nn.Parameter],
) -> Tensor:
    """Run an operation, given as a function of its activations, behind a bridge.

    Args:
        deferred: Where it waits.
        call: The operation.
        activations: What it is a function of.
        parameters: Those of the stage, some of which it uses.
    """
    deferred.places += 1
    deferred.ends_in(parameters)
    # detach() shares the version counter: a change in place is noticed, as without us.
    inner = [tensor.detach().requires_grad_() for tensor in activations]
    made: Tensor = _cross(deferred, [call(inner)], inner, *activations)
    return made


def hold(deferred: Deferred, values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return values with their gradients stopped, by identity, to be added in their turn in W."""
    deferred.places += 1
    # A node for each, made now: it takes the turn that this use has in the plain model. It hands
    # the gradient on as it is, so that autograd knows whether others hold it too.
    edges = [gradient_edge(torch.ops.aten.alias.default(value)) for value in values]
    held = _stop(deferred, edges, _ANCHOR, *(value.detach() for value in values))
    return {id(value): new for value, new in zip(values, held, strict=True)}
